"""The screen of `quire top`, from one look at a server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...proto.block_map import BlockState
from ..client.wire.status import BlockMapInfo, FleetInfo, LatencyInfo, NodeInfo, ReplicaInfo, TrafficInfo

# A status is due every second.
SILENT_S = 3.0
MAP_LINES = 4
# Terminals below this width show the traffic of a model in lines of words instead of a table.
TABLE_WIDTH = 120
# Terminals from this width on show the last minute, HISTORY_S per character.
HISTORY_WIDTH = 140
HISTORY_S = 3
# Each state has a character of its own, so that the map can be read without color.
GLYPHS = {
    BlockState.EMPTY: ("·", "dim"),
    BlockState.CACHED: ("░", "cyan"),
    BlockState.FENCED: ("x", "yellow"),
    BlockState.HELD: ("█", "green"),
    BlockState.SHARED: ("▓", "bold green"),
}
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Look:
    """Latest view of a server.

    Attributes:
        seen_at: Unix time of the latest answer; None before the first.
        maps: replica |-> its blocks, for replicas that sent them.
        problem: why the server does not answer now; empty if it does.
    """

    seen_at: float | None = None
    fleet: FleetInfo = field(default_factory=FleetInfo)
    maps: Mapping[str, BlockMapInfo] = field(default_factory=dict)
    problem: str = ""


def render(look: Look, target: str, now: float, width: int) -> RenderableType:
    """Return the screen.

    Args:
        now: Unix time.
        width: characters in a line of the terminal.
    """
    parts: list[RenderableType] = [_headline(look, target, now)]
    if look.fleet.problem:
        parts.append(Text(f"the fleet's state is out of date: {look.fleet.problem}", "red"))
    if look.fleet.traffic:
        narrow = width < TABLE_WIDTH
        parts += _traffic_lines(look.fleet) if narrow else [_traffic_table(look.fleet, width)]
    for replica in look.fleet.replicas:
        parts += [Text(), *_replica(replica, look.maps.get(replica.replica_id), width)]
    if look.fleet.nodes:
        parts += [Text(), _node_table(look.fleet.nodes)]
    return Group(*parts)


def _headline(look: Look, target: str, now: float) -> Text:
    line = Text.assemble(("quire top", "bold"), f"  {target}  {_clock_time(now)}")
    if look.problem:
        since = (
            "" if look.seen_at is None else f" since {_clock_time(look.seen_at)}, {now - look.seen_at:.0f} s"
        )
        line.append(f"  no answer{since}: {look.problem}", "bold red")
    return line


def _traffic_table(fleet: FleetInfo, width: int) -> Table:
    with_history = width >= HISTORY_WIDTH
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = ("replicas", "open", "unplaced", "gen tok/s", "prompt tok/s", "done/s", "errors/s")
    texts = ("first token p50/p99", "next token p50/p99", *(("last minute",) if with_history else ()))
    for name in ("model", *columns, *texts):
        table.add_column(name, header_style="dim", justify="right" if name in columns else "left")
    for traffic in fleet.traffic:
        figures = _figures(fleet, traffic)
        errors = Text(f"{traffic.errors_per_s:.1f}", "red" if traffic.errors_per_s else "")
        latencies = _latency(traffic.first_token), _latency(traffic.inter_token)
        history = (_sparkline(traffic),) if with_history else ()
        table.add_row(Text(traffic.model, "bold"), *figures, errors, *latencies, *history)
    return table


def _traffic_lines(fleet: FleetInfo) -> list[Text]:
    """Return what the table shows in lines of at most 80 characters."""
    lines = []
    for traffic in fleet.traffic:
        count, num_open, unplaced, generated, prompt, done = _figures(fleet, traffic)
        name = Text(f"{traffic.model}  ", "bold", no_wrap=True, overflow="ellipsis")
        lines += [
            name.append(f"{count} replicas, {num_open} open, {unplaced} unplaced", "not bold"),
            Text(f"  {generated} generated and {prompt} prompt tok/s, {done} done/s").append(
                f", {traffic.errors_per_s:.1f} errors/s", "red" if traffic.errors_per_s else ""
            ),
            Text(
                f"  p50/p99: first token {_latency(traffic.first_token)}, next {_latency(traffic.inter_token)}"
            ),
        ]
    return lines


def _figures(fleet: FleetInfo, traffic: TrafficInfo) -> tuple[str, ...]:
    return (
        _replica_count(fleet, traffic.model),
        f"{traffic.num_open}",
        f"{traffic.num_unplaced}",
        f"{traffic.generated_tokens_per_s:,.0f}",
        f"{traffic.prompt_tokens_per_s:,.0f}",
        f"{traffic.completions_per_s:.1f}",
    )


def _replica_count(fleet: FleetInfo, model: str) -> str:
    """Return the number of ready replicas, and the number that is wanted or known."""
    replicas = [replica for replica in fleet.replicas if replica.model == model]
    targets = [each.target_replicas for each in fleet.deployments if each.model == model]
    return f"{sum(replica.ready for replica in replicas)}/{targets[0] if targets else len(replicas)}"


def _latency(latency: LatencyInfo) -> str:
    if latency.p50_s is None or latency.p99_s is None:
        return "-"
    return f"{_seconds(latency.p50_s)} / {_seconds(latency.p99_s)}"


def _seconds(value: float) -> str:
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _sparkline(traffic: TrafficInfo) -> Text:
    """Return the generated tokens per second of the last minute, HISTORY_S per character."""
    history = traffic.generated_tokens_per_s_history
    peaks = [max(history[max(0, end - HISTORY_S) : end]) for end in range(len(history), 0, -HISTORY_S)][::-1]
    top = max(peaks, default=0.0) or 1.0
    return Text("".join(_BARS[min(7, int(8 * value / top))] for value in peaks), "green", no_wrap=True)


def _replica(replica: ReplicaInfo, blocks: BlockMapInfo | None, width: int) -> list[RenderableType]:
    title = Text.assemble(
        (replica.replica_id, "bold"),
        f"  {replica.model} {replica.version}  {_role(replica)}",
        _state(replica),
    )
    if not replica.kv.num_blocks:  # it has not answered yet
        return [title]
    kv, queue = replica.kv, replica.queue
    num_empty = kv.num_blocks - kv.num_used_blocks - kv.num_fenced_blocks - kv.num_cached_blocks
    figures = (
        f"{queue.num_running} running, {queue.num_waiting} waiting"
        + (f" (oldest {replica.oldest_wait_s:.0f} s)" if replica.oldest_wait_s >= 1 else "")
        + f", {queue.num_preemptions} preempted, {replica.num_steps} steps, "
        f"{replica.tokens_per_s:,.0f} tok/s while busy, {1e3 * replica.mean_plan_wait_s:.2f} ms per plan"
    )
    fullest = f" ({kv.fullest_kv_use:.0%} of the fullest rank's)" if kv.is_uneven else ""
    used = (
        f"KV {kv.num_used_blocks} of {kv.num_blocks} blocks active{fullest}, {kv.num_fenced_blocks} fenced, "
        f"{kv.num_cached_blocks} cached, {num_empty} empty, prefix hits {kv.prefix_hit_rate:.0%}"
    )
    if kv.num_state_slots:
        used += (
            f"; states {kv.num_used_state_slots} of {kv.num_state_slots} slots, {kv.num_snapshots} snapshots"
        )
    if kv.stores_blocks:
        used += f"; files {kv.num_disk_blocks} blocks on disk, {kv.num_shared_blocks} shared"
    if kv.num_kv_offers or kv.num_kv_pulls or kv.num_kv_failures:
        used += (
            f"; KV of {kv.num_kv_pulls} sequences came, of {kv.num_kv_offers} left ({kv.num_kv_leases} held), "
            f"{kv.kv_pull_bytes_per_s / 1e6:,.0f} MB/s, {sum(kv.num_kv_failures)} in vain"
        )
    ranks = "   ".join(f"rank {rank.rank} {rank.device} {rank.node} {rank.stage}" for rank in replica.ranks)
    parts: list[RenderableType] = [title, Text(figures), Text(used)]
    if blocks is not None:
        parts.append(block_map_text(blocks, width))
    return [*parts, Text(ranks, "dim")]


def _role(replica: ReplicaInfo) -> str:
    return "" if replica.role in ("", "both") else f"{replica.role}  "


def _state(replica: ReplicaInfo) -> Text:
    if replica.silence_s > SILENT_S:
        return Text(f"silent for {replica.silence_s:.0f} s", "bold red")
    if replica.ready and replica.state != "draining":
        return Text("ready", "green")
    name = replica.state if replica.state not in (None, "ready") else "not ready"
    return Text(f"{name}: {replica.problem}" if replica.problem else str(name), "yellow")


def block_map_text(blocks: BlockMapInfo, width: int) -> Text:
    """Return the map in at most MAP_LINES lines, and as many of state slots, if there are any."""
    text = Text(no_wrap=True)
    per_glyph = _append_cells(text, blocks.states, width)
    if blocks.slot_states:
        text.append("\nstate slots\n", "dim")
        _append_cells(text, blocks.slot_states, width)
    legend = "  ".join(f"{glyph} {state.name.lower()}" for state, (glyph, _) in GLYPHS.items())
    each = blocks.stride * per_glyph
    return text.append(f"\n{legend}" + (f"  ({each} blocks per character)" if each > 1 else ""), "dim")


def _append_cells(text: Text, states: bytes, width: int) -> int:
    """Append a character for the most frequent state of some cells each; return the number of these."""
    per_glyph = -(-len(states) // (width * MAP_LINES)) or 1
    for number, start in enumerate(range(0, len(states), per_glyph)):
        if number and number % width == 0:
            text.append("\n")
        ((state, _),) = Counter(states[start : start + per_glyph]).most_common(1)
        text.append(*GLYPHS[BlockState(state)])
    return per_glyph


def _node_table(nodes: Sequence[NodeInfo]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("node", "address", "state"):
        table.add_column(name)
    for node in nodes:
        table.add_row(node.node_id[:12], node.address, "draining" if node.draining else "ready")
    return table


def _clock_time(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
