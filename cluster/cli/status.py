"""`quire status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .connection import Target, TlsCa, TokenFile, connect
from .exit_status import FAILED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...proto.admin_pb2 import Replica


def status(target: Target = "127.0.0.1:50051", token_file: TokenFile = None, tls_ca: TlsCa = None) -> None:
    """Show replicas, ranks, KV use and queue. Exit status 1 when a replica is not ready.

    Example: `quire status --target 127.0.0.1:50051`
    """
    from rich.console import Console

    with connect(target, token_file, tls_ca) as client:
        replicas = client.status()
    console = Console()
    for replica in replicas:
        for part in _describe(replica):
            console.print(part)
    if not all(replica.ready for replica in replicas):
        raise typer.Exit(FAILED)


def _describe(replica: Replica) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    state = Text("ready", "green") if replica.ready else Text(f"not ready: {replica.problem}", "red")
    title = Text.assemble(Text(replica.replica_id, "bold"), f"  {replica.model}  ", state)
    if not replica.num_steps and not replica.ranks:  # it did not answer
        return [title]
    ranks = Table("rank", "pid", "node", "device", "stage", title="Ranks", title_justify="left")
    for rank in replica.ranks:
        ranks.add_row(str(rank.rank), str(rank.pid), rank.node, rank.device, rank.stage)
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(replica):
        figures.add_row(Text(name, "dim"), value)
    return [title, ranks, figures]


def _figures(replica: Replica) -> list[tuple[str, str]]:
    kv, queue = replica.kv, replica.queue
    hit_rate = kv.prefix_hit_tokens / kv.prefix_query_tokens if kv.prefix_query_tokens else 0.0
    return [
        (
            "KV blocks",
            f"{kv.num_used_blocks} of {kv.num_blocks} used ({kv.num_used_tokens} tokens, {kv.block_size} a block), "
            f"{kv.num_cached_blocks} cached, {kv.peak_used_blocks} at peak",
        ),
        (
            "host blocks",
            f"{kv.num_used_host_blocks} of {kv.num_host_blocks} used, {kv.num_cached_host_blocks} cached, "
            f"{kv.num_swapped_blocks} blocks swapped so far",
        ),
        ("KV waste", f"{kv.mean_waste:.1%} of allocated slots, mean over all steps"),
        (
            "prefix cache",
            f"{kv.prefix_hit_tokens} of {kv.prefix_query_tokens} prompt tokens found ({hit_rate:.1%})",
        ),
        (
            "queue",
            f"{queue.num_waiting} waiting, {queue.num_running} running, {queue.num_finished} finished, "
            f"{queue.num_preemptions} preemptions",
        ),
        ("steps", f"{replica.num_steps} in {replica.uptime_s:.0f} s"),
    ]
