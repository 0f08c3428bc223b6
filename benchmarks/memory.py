"""KV memory saved by prefix caching, replayed from traces in simulated time, and by windows.

    python -m benchmarks.memory [--traces DIR] [--quick] --json benchmarks/results/memory.json

The serving scheduler makes every decision; only the ranks are simulated. The arrivals of each trace are
scaled so that its prompts and KV reads keep the simulated machine busy for a share LOAD of the time.

- memory.hit_rate.<trace>.<blocks>: share of prompt tokens found in a pool of that many blocks, which running
  sequences and their outputs use as well. Outputs are cached, but they are random, so no later prompt contains them.
  `alone` is the same with one prompt at a time and no outputs. `lru` is the share of blocks that a plain
  least-recently-used cache finds in that case, computed from the hashes alone. Without <blocks>: the largest pool.
- memory.windows.<model>.<tokens>: sequences of that many tokens in the same memory, relative to a cache that holds
  all tokens of every layer. Arithmetic of the layout that serves (proto/cache_groups.py), with the shapes of
  published models in 16 bits.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.common import Figure, make_parser, report
from benchmarks.replay import busy_s, replay, roofline
from benchmarks.trace import Trace, read_traces
from quire.proto.cache_groups import make_layout

BUNDLED = Path(__file__).parent / "traces"
LOAD = 0.75
POOL_BLOCKS = (1_000, 4_000, 16_000, 64_000)
# Requests per trace: of a smoke test, and of the bundled traces.
NUM_QUICK, NUM_BUNDLED = 8, 300


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache of a published model.

    Attributes:
        windows: of each layer, 0 for none.
        full_heads: number and size of the KV heads of layers without a window, if they differ.
    """

    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    full_heads: tuple[int, int] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers that each layer caches for a token."""
        size = 2 * self.num_kv_heads * self.head_dim
        full = size if self.full_heads is None else 2 * self.full_heads[0] * self.full_heads[1]
        return tuple(size if window else full for window in self.windows)


SHAPES = {
    "gpt-oss-20b": Shape((128, 0) * 12, 8, 64, 131_072),
    "gemma-3-27b": Shape((((1024,) * 5 + (0,)) * 11)[:62], 16, 128, 131_072),
    "gemma-4-31b": Shape(((1024,) * 5 + (0,)) * 10, 16, 256, 262_144, full_heads=(4, 512)),
    "gemma-2-9b": Shape((4096, 0) * 21, 8, 256, 8_192),
    "cohere-2-7b": Shape(((4096,) * 3 + (0,)) * 8, 8, 128, 131_072),
    "mistral-7b-v0.1": Shape((4096,) * 32, 8, 128, 32_768),
}
WINDOW_LENGTHS = (8_192, 32_768, 131_072)

Figures = dict[str, Figure]


def at_load(trace: Trace) -> Trace:
    """Return the trace with arrivals scaled to LOAD."""
    return trace.over(busy_s(trace, roofline()) / LOAD)


def measure_hits(trace: Trace, num_blocks: int) -> Figures:
    name, column = f"memory.hit_rate.{trace.name}", f"{num_blocks // 1000}k"
    served, alone = replay(at_load(trace), num_blocks), replay(trace.one_at_a_time(), num_blocks)
    left_out = f", {served.num_left_out} too long for the pool" if served.num_left_out else ""
    note = f"{len(trace.requests)} requests{left_out}, {served.mean_running:.0f} running, {num_blocks} blocks"
    figures = {
        f"{name}.{column}": Figure(100 * served.hit_rate, "%", f"{note}, outputs cached too"),
        f"{name}.alone.{column}": Figure(100 * alone.hit_rate, "%", "prompts alone, share of tokens"),
        f"{name}.lru.{column}": Figure(
            100 * lru_hit_rate(trace, num_blocks), "%", "prompts alone, share of blocks"
        ),
    }
    if num_blocks == POOL_BLOCKS[-1]:
        figures[name] = figures[f"{name}.{column}"]
    return figures


def lru_hit_rate(trace: Trace, num_blocks: int) -> float:
    """Return the share of the prompts' blocks that a least-recently-used cache holds.

    Only a prompt's leading run of cached blocks counts. A prompt's last blocks are evicted before its first.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_looked_up = 0
    for request in trace.requests:
        missed = (index for index, block in enumerate(request.block_hashes) if block not in cache)
        num_hits += next(missed, len(request.block_hashes))
        num_looked_up += len(request.block_hashes)
        for block in reversed(request.block_hashes):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hits / num_looked_up


def measure_windows(model: str) -> Figures:
    """Return how many times as many sequences fit if layers with a window hold their window only."""
    shape, figures = SHAPES[model], Figures()
    num_layers = len(shape.windows)
    layout = make_layout(num_layers, shape.windows, shape.max_model_len, 0, shape.sizes)
    layer_kib = max(shape.sizes) * 2 / 1024
    for length in WINDOW_LENGTHS:
        if length <= shape.max_model_len:
            before = sum(shape.sizes) * 2 / 1024
            now = layout.layers_per_block * layer_kib * layout.num_slots(length) / length
            note = f"{now:.1f} instead of {before:.0f} KiB per token, {len(layout.groups)} groups"
            figures[f"memory.windows.{model}.{length}"] = Figure(before / now, "x", note)
    return figures


def make_trace_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that replays traces; see `chosen_traces`."""
    parser = make_parser(description)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="full traces (see benchmarks/traces/README.md); default: their bundled first requests",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="replay a few requests per trace, as a smoke test"
    )
    return parser


def chosen_traces(arguments: argparse.Namespace, num_bundled: int) -> list[Trace]:
    """Return the traces that the arguments name: whole, the first requests of bundled ones, or a few of each."""
    traces = read_traces(arguments.traces or BUNDLED)
    if arguments.quick or arguments.traces is None:
        return [trace.first(NUM_QUICK if arguments.quick else num_bundled) for trace in traces]
    return traces


def main() -> None:
    arguments = make_trace_parser(__doc__).parse_args()
    figures: Figures = {}
    for model in SHAPES:
        figures |= measure_windows(model)
    traces = [trace for trace in chosen_traces(arguments, NUM_BUNDLED) if trace.shares_prefixes]
    jobs = [(trace, num_blocks) for trace in traces for num_blocks in POOL_BLOCKS]
    for trace, num_blocks in track(jobs, "replaying", transient=True):
        figures |= measure_hits(trace, num_blocks)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
