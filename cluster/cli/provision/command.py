"""`quire up` and `quire down`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....proto.errors import ConfigError
from ..exit_status import FAILED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .cluster_file import ClusterFile, NodeType

File = Annotated[Path | None, typer.Argument(help="A cluster file, as for `ray up`.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def up(
    file: File = None,
    yes: Yes = False,
    ignore_problems: Annotated[
        bool, typer.Option(help="Start the cluster although the check found problems.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Check the file and show what would be started, without starting it.")
    ] = False,
    example: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Print a cluster file to edit. One of: aws, gcp, azure, onprem, kuberay."
        ),
    ] = None,
) -> None:
    """Start or update a cluster, on cloud instances or on your own machines.

    Example: `quire up --example aws > cluster.yaml`, edit it, then `quire up cluster.yaml`
    """
    from rich.console import Console

    from . import cluster_file, ray_launcher

    if example is not None:
        print(cluster_file.example(example), end="")
        return
    cluster = cluster_file.ClusterFile.read(_required(file))
    console = Console()
    for part in _describe_start(cluster):
        console.print(part)
    problems = cluster.problems()
    for problem in problems:
        console.print(f"[red]problem[/]: {problem}", highlight=False)
    if dry_run:
        raise typer.Exit(FAILED if problems else 0)
    if problems and not ignore_problems:
        raise ConfigError(f"{cluster.path} has problems; fix them, or start it anyway with --ignore-problems")
    ray_launcher.check_sdk(cluster.provider)
    if not yes:
        typer.confirm("Start it?", abort=True)
    ray_launcher.run_ray("up", cluster)


def down(file: File = None, yes: Yes = False) -> None:
    """Stop a cluster that `quire up` started, with all of its nodes and replicas.

    Example: `quire down cluster.yaml`
    """
    from . import ray_launcher
    from .cluster_file import ClusterFile

    cluster = ClusterFile.read(_required(file))
    ray_launcher.check_sdk(cluster.provider)
    name = cluster.config["cluster_name"]
    print(
        f"This stops every node of cluster {name!r} ({cluster.location}) and aborts the requests that run on it."
    )
    print("To lose no request, first run quire drain, then wait until quire status shows none running.")
    if not yes:
        typer.confirm("Stop it?", abort=True)
    ray_launcher.run_ray("down", cluster)


def _required(file: Path | None) -> Path:
    if file is None:
        raise ConfigError(
            "no cluster file is given; `quire up --example aws > cluster.yaml` writes one to edit"
        )
    return file


def _describe_start(cluster: ClusterFile) -> list[RenderableType]:
    from rich.table import Table

    config = cluster.config
    nodes = Table("node type", "machine", "GPUs", "price", "nodes", title="Nodes", title_justify="left")
    for node in cluster.node_types:
        nodes.add_row(*_columns(node))
    summary = Table.grid(padding=(0, 2))
    summary.add_row(
        "cluster",
        f"{config['cluster_name']} ({cluster.location}), at most {config['max_workers']} nodes besides the head",
    )
    is_internal = config["provider"].get("use_internal_ips")
    summary.add_row("network", "no public addresses" if is_internal else "as the machines' network allows")
    for command in config["head_start_ray_commands"]:
        if "quire serve" in command:
            summary.add_row("runs", command[command.index("quire serve") :].partition(";")[0])
    return [nodes, summary]


def _columns(node: NodeType) -> tuple[str, str, str, str, str]:
    gpus = f"{node.resources.get('GPU', 0):g}" if node.instance is None else node.instance.gpu_summary
    count = "the head" if node.is_head else f"{node.min_workers} to {node.max_workers}"
    return node.name, node.machine or "your own", gpus, "spot" if node.is_spot else "on demand", count
