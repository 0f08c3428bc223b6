"""`quire status` and `quire health`."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .exit_status import FAILED

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ...proto.replica_status import KvCacheInfo
    from ..client.wire.status import FleetInfo, ReplicaInfo

# Columns of --wide.
_WIDE = 240
_CLEAR_SCREEN = "\033[2J\033[H"


def status(
    target: Target = DEFAULT_TARGET,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the state as one JSON object; with --watch one per line.")
    ] = False,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Show the state again after this time, until Ctrl-C.", min=0.1),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Cut no column to the terminal's width, and show stopped replicas.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Show replicas, ranks, KV use and queue; for a fleet also models and nodes.

    The exit status is 1 if a model has fewer ready replicas than it should have.

    Example: `quire status --target 127.0.0.1:50051`
    """
    show = _print_json if as_json else partial(_print, wide=wide)
    with connect(target, token_file, tls_ca) as client:
        if watch is None:
            state = client.fleet()
            show(state)
            raise typer.Exit(0 if not state.problem and _is_healthy(state) else FAILED)
        while True:
            state = client.fleet()
            if sys.stdout.isatty() and not as_json:
                print(_CLEAR_SCREEN, end="")
            show(state)
            time.sleep(watch)


def _print_json(state: FleetInfo) -> None:
    from dataclasses import asdict

    print(json.dumps({"healthy": not state.problem and _is_healthy(state), **asdict(state)}), flush=True)


def _print(state: FleetInfo, wide: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=_WIDE if wide else None)
    if state.problem:
        console.print(f"[red]the fleet's state is out of date[/]: {escape(state.problem)}")
    for part in _describe_fleet(state):
        console.print(part)
    stopped = [] if wide else [replica for replica in state.replicas if replica.state == "stopped"]
    for replica in state.replicas:
        if replica not in stopped:
            for part in _describe(replica):
                console.print(part)
    if stopped:
        names = "replica" if len(stopped) == 1 else "replicas"
        console.print(f"[dim]{len(stopped)} stopped {names}; --wide shows them[/]")


def _is_healthy(status: FleetInfo) -> bool:
    """Return if each model has its target number of ready replicas; without a fleet, if all replicas are ready."""
    if not status.deployments:
        return all(replica.ready for replica in status.replicas)
    return all(
        sum(replica.ready and replica.model == model.model for replica in status.replicas)
        >= model.target_replicas
        for model in status.deployments
    )


def _describe_fleet(status: FleetInfo) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    if status.deployments:
        table = Table(
            "model", "version", "replicas", "min..max", "reason", title="Models", title_justify="left"
        )
        for model in status.deployments:
            num_ready = sum(each.ready and each.model == model.model for each in status.replicas)
            reason = Text(model.reason)
            if model.problem:
                reason.append(f"\n{model.problem}", "red")
            bounds = f"{model.min_replicas}..{model.max_replicas}"
            table.add_row(
                model.model, model.version, f"{num_ready} of {model.target_replicas}", bounds, reason
            )
        parts.append(table)
    if status.nodes:
        table = Table("node", "address", "resources", "state", title="Nodes", title_justify="left")
        for node in status.nodes:
            resources = ", ".join(
                f"{amount:g} {name}" if name != "memory" else f"{amount / 2**30:.0f} GiB"
                for name, amount in sorted(node.resources.items())
            )
            table.add_row(
                node.node_id[:12], node.address, resources, "draining" if node.draining else "ready"
            )
        parts.append(table)
    return parts


def _describe(replica: ReplicaInfo) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    title = Text.assemble(
        Text(replica.replica_id, "bold"),
        f"  {replica.model}  {replica.version}  {_role(replica)}",
        _state(replica),
    )
    if not replica.num_steps and not replica.ranks:  # the replica did not answer
        return [title]
    ranks = Table("rank", "pid", "node", "device", "stage", "times", title="Ranks", title_justify="left")
    for rank in replica.ranks:
        ranks.add_row(str(rank.rank), str(rank.pid), rank.node, rank.device, rank.stage, rank.times)
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(replica):
        figures.add_row(Text(name, "dim"), value)
    return [title, ranks, figures]


def _state(replica: ReplicaInfo) -> Text:
    from rich.text import Text

    if replica.ready and replica.state != "draining":
        return Text("ready", "green")
    if replica.state in (None, "ready"):
        return Text(f"not ready: {replica.problem}", "red")
    color = {"failed": "red", "stopped": "dim"}.get(replica.state, "yellow")
    return Text(f"{replica.state}: {replica.problem}" if replica.problem else replica.state, color)


def _stored(kv: KvCacheInfo) -> str:
    """Return the line about blocks in files."""
    return (
        f"{kv.num_disk_blocks} on disk ({kv.disk_bytes / 2**20:,.0f} MiB), {kv.num_shared_blocks} shared "
        f"({kv.shared_bytes / 2**20:,.0f} MiB), {kv.num_read_blocks} read, {kv.num_written_blocks} written, "
        f"{kv.stored_hit_tokens} tokens found, {kv.num_corrupt_blocks} corrupt, {kv.num_late_reads} reads late"
    )


def _role(replica: ReplicaInfo) -> str:
    return "" if replica.role in ("", "both") else f"{replica.role}  "


def _failed_pulls(kv: KvCacheInfo) -> str:
    """Return how many pulls failed, why, and what was computed instead."""
    from ...proto.kv_transfer import KvFailure

    counts = zip(KvFailure, kv.num_kv_failures, strict=False)
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts if count)
    failed = f"{sum(kv.num_kv_failures)} in vain"
    return (
        f"{failed} ({reasons}), {kv.num_kv_recomputed_tokens} tokens computed instead" if reasons else failed
    )


def _figures(replica: ReplicaInfo) -> list[tuple[str, str]]:
    kv, queue = replica.kv, replica.queue
    fullest = f", {kv.fullest_kv_use:.0%} of the fullest rank's" if kv.is_uneven else ""
    states = (
        f"{kv.num_used_state_slots} of {kv.num_state_slots} used, {kv.num_snapshots} snapshots of prefixes, "
        f"{kv.num_saved_snapshots} saved so far"
        + (
            f"; {kv.num_host_snapshots} in {kv.num_host_state_slots} of host memory"
            if kv.num_host_state_slots
            else ""
        )
    )
    ahead = f", {kv.num_kv_ahead_tokens} tokens ahead of their sequences" if kv.num_kv_ahead_tokens else ""
    split = f", {kv.num_split_prompts} after their prompt" if kv.num_split_prompts else ""
    moves = (
        f"{kv.num_kv_offers} leases of blocks{split}, {kv.num_kv_leases} held; {kv.num_kv_pulls} "
        f"came from other replicas with theirs ({kv.num_kv_pulled_tokens} tokens, {kv.num_kv_pulled_bytes} bytes, "
        f"{kv.kv_pull_bytes_per_s / 1e6:,.0f} MB/s{ahead}), {_failed_pulls(kv)}"
    )
    return [
        (
            "KV blocks",
            f"{kv.num_used_blocks} of {kv.num_blocks} used{fullest} "
            f"({kv.num_used_tokens} tokens, {kv.block_size} per block), "
            f"{kv.num_cached_blocks} cached, {kv.peak_used_blocks} at peak",
        ),
        (
            "host blocks",
            f"{kv.num_used_host_blocks} of {kv.num_host_blocks} used, {kv.num_cached_host_blocks} cached, "
            f"{kv.num_swapped_blocks} blocks swapped so far",
        ),
        *([("state slots", states)] if kv.num_state_slots else []),
        *([("KV moves", moves)] if kv.num_kv_offers or kv.num_kv_pulls or kv.num_kv_failures else []),
        *([("stored blocks", _stored(kv))] if kv.stores_blocks else []),
        ("KV fragmentation", f"{kv.mean_kv_fragmentation:.1%} of allocated slots, mean over all steps"),
        (
            "prefix cache",
            f"{kv.prefix_hit_tokens} of {kv.prefix_query_tokens} prompt tokens found ({kv.prefix_hit_rate:.1%})",
        ),
        (
            "queue",
            f"{queue.num_waiting} waiting, {queue.num_running} running, {queue.num_finished} finished, "
            f"{queue.num_preemptions} preemptions",
        ),
        (
            "activity",
            f"{replica.activity} for {replica.activity_s:.1f} s, {replica.num_recoveries} recoveries of the ranks",
        ),
        (
            "steps",
            f"{replica.num_steps} in {replica.uptime_s:.0f} s, {1e3 * replica.mean_plan_wait_s:.2f} ms between steps",
        ),
    ]


def health(target: Target = DEFAULT_TARGET, tls_ca: TlsCa = None) -> None:
    """Print ready or not ready, with exit status 0 or 1. Needs no token, for use in probes.

    Example: `quire health --target 127.0.0.1:50051`
    """
    with connect(target, None, tls_ca) as client:
        is_ready = client.is_ready()
    print("ready" if is_ready else "not ready")
    if not is_ready:
        raise typer.Exit(FAILED)
