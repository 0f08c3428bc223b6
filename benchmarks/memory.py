"""KV memory saved by paging, sharing and prefix caching, replayed from traces in simulated time.

    python -m benchmarks.memory [--traces DIR] [--quick] --json benchmarks/results/memory.json

The serving scheduler makes every decision; benchmarks.replay lists what is simulated. The arrivals of each trace are
scaled so that its prompts and KV reads keep the simulated machine busy for a share LOAD of the time. Hit rates are
measured on all requests, waste and sharing on the first ones (class Extent); each figure's note gives the number.

- memory.waste.<trace>.<block size>: share of the KV slots of held blocks that hold no token, averaged over time.
  For comparison, the waste of contiguous memory on the same lengths: reserved for the longest request
  (contiguous_max), or for the prompt and the next power of two of the output (contiguous_pow2).
- memory.hit_rate.<trace>.<blocks>: share of prompt tokens found in a pool of that many blocks, which running
  sequences and their outputs use as well. Outputs are cached, but they are random, so no later prompt contains them.
  `alone` is the same with one prompt at a time and no outputs. `lru` is the share of blocks that a plain
  least-recently-used cache finds in that case, computed from the hashes alone. Without <blocks>: the largest pool.
- memory.windows.<model>.<tokens>: sequences of that many tokens in the same memory, relative to a cache that holds
  all tokens of every layer. Arithmetic of the layout that serves (proto/cache_groups.py), with the shapes of
  published models in 16 bits.
- memory.saved.<n or beam>.<width>.<lengths>: share of the blocks of all tables that sharing saves, at block size 16.

The lengths `alpaca` and `sharegpt` are drawn log-normally around the means of the PagedAttention paper (Kwon et al.,
SOSP 2023); the notes quote the paper's own measurements. Beam searches choose from simulated candidates: the token
of rank r has probability ~ r ** -s, with s between 1 and 6 for each beam and position. The saving depends on how
similar the beams are, so two cases are measured: at a position the beams of a request have the same s half of the
time, or always (`related`).
"""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from rich.progress import track

from benchmarks.common import Figure, make_parser, report
from benchmarks.replay import Roofline, ZipfCandidates, replay
from benchmarks.trace import Trace, draw_lengths, read_traces
from quire.proto.cache_groups import make_layout
from quire.proto.sampling import SamplingParams

BUNDLED = Path(__file__).parent / "traces"
LOAD = 0.75
POOL_TOKENS = 393_216  # about 50 GB of the simulated model's KV
BLOCK_SIZES = (8, 16, 32, 64)
POOL_BLOCKS = (1_000, 4_000, 16_000, 64_000)
WIDTHS = (2, 4, 6)
SHARING_LENGTHS = ("alpaca", "sharegpt", "lengths_sharegpt_8k")

# The paper's mean lengths of prompts and outputs, and the savings that it measured for widths 2 to 6.
ALPACA, SHAREGPT = (19.31, 58.45), (161.31, 337.99)
PAPER_SAVED = {
    ("n", "alpaca"): "paper: 6.1 to 9.8 %",
    ("n", "sharegpt"): "paper: 16.2 to 30.5 %",
    ("beam", "alpaca"): "paper: 37.6 to 55.2 %",
    ("beam", "sharegpt"): "paper: 44.3 to 66.3 %",
}


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
Job = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Extent:
    """Amount of each trace that is replayed.

    Attributes:
        most_requests: requests per trace.
        most_output_tokens: output tokens per trace when waste and sharing are measured, whose averages settle early.
            Hit rates depend on all earlier requests, so this limit does not apply to them.
        num_beams: beams, over all requests, per replay that measures sharing; parallel sampling draws 10 times as
            many sequences.
    """

    most_requests: int
    most_output_tokens: int
    num_beams: int


QUICK = Extent(8, 2_000, num_beams=4)
DEFAULT = Extent(300, 100_000, num_beams=90)
WHOLE = Extent(1_000_000, 400_000, num_beams=180)


def at_load(trace: Trace, num_sequences: int = 1) -> Trace:
    """Return the trace with arrivals scaled to LOAD, for requests of `num_sequences` sequences each."""
    return trace.over(Roofline().busy_s(trace) * num_sequences / LOAD)


def measure_waste(trace: Trace, block_size: int) -> Figures:
    outcome = replay(at_load(trace), POOL_TOKENS // block_size, block_size)
    note = f"{len(trace.requests)} requests, {outcome.mean_running:.0f} running; paper: under 4 %"
    return {f"memory.waste.{trace.name}.{block_size}": Figure(100 * outcome.waste, "%", note)}


def contiguous_waste(trace: Trace) -> Figures:
    """Return the share of contiguous memory that is reserved but unused while each request's output grows."""
    longest = trace.max_tokens
    used = to_longest = to_power = 0.0
    for request in trace.requests:
        steps = request.num_output_tokens
        used += steps * (request.num_prompt_tokens + steps / 2)
        to_longest += steps * longest
        to_power += steps * (request.num_prompt_tokens + 2 ** math.ceil(math.log2(steps)))
    note = "reserved and not filled; paper: 62 to 80 %, with fragmentation"
    return {
        f"memory.waste.{trace.name}.contiguous_max": Figure(100 * (1 - used / to_longest), "%", note),
        f"memory.waste.{trace.name}.contiguous_pow2": Figure(100 * (1 - used / to_power), "%", note),
    }


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


def measure_saved_by_parallel_sampling(width: int, lengths: Trace, num_sequences: int) -> Figures:
    trace = lengths.first(max(2, num_sequences // width))
    outcome = replay(at_load(trace, width), POOL_TOKENS // 16, sampling=SamplingParams(n=width))
    return {f"memory.saved.n.{width}.{trace.name}": Figure(100 * outcome.saved, "%", _saved_note("n", trace))}


def measure_saved_by_beams(width: int, lengths: Trace, num_beams: int, relatedness: float) -> Figures:
    trace = lengths.first(max(2, num_beams // width))
    candidates = ZipfCandidates(relatedness=relatedness)
    sampling = SamplingParams(beam_width=width)
    outcome = replay(at_load(trace, width), POOL_TOKENS // 16, sampling=sampling, candidates=candidates)
    name = f"memory.saved.beam.{width}.{trace.name}" + (".related" if relatedness == 1.0 else "")
    return {name: Figure(100 * outcome.saved, "%", _saved_note("beam", trace))}


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


def _saved_note(kind: str, trace: Trace) -> str:
    num_requests, paper = len(trace.requests), PAPER_SAVED.get((kind, trace.name))
    return f"{num_requests} requests, lengths drawn; {paper}" if paper else f"{num_requests} requests"


def jobs(traces: list[Trace], extent: Extent) -> Iterator[Job]:
    """Yield all measurements, of one or two replays each, and what windows save."""
    yield from (partial(measure_windows, model) for model in SHAPES)
    for trace in traces:
        if trace.shares_prefixes:
            whole = trace.first(extent.most_requests)
            yield from (partial(measure_hits, whole, num_blocks) for num_blocks in POOL_BLOCKS)
    drawn = [draw_lengths("alpaca", *ALPACA, 2000), draw_lengths("sharegpt", *SHAREGPT, 2000)]
    lengths = [shorten(trace, extent) for trace in (*drawn, *traces)]
    for trace in lengths:
        yield partial(contiguous_waste, trace)
        yield from (partial(measure_waste, trace, block_size) for block_size in BLOCK_SIZES)
    for trace in lengths:
        if trace.name in SHARING_LENGTHS:
            for width in WIDTHS:
                yield partial(measure_saved_by_parallel_sampling, width, trace, 10 * extent.num_beams)
                for relatedness in (0.5, 1.0):
                    yield partial(measure_saved_by_beams, width, trace, extent.num_beams, relatedness)


def shorten(trace: Trace, extent: Extent) -> Trace:
    """Return the first requests of the trace, within the extent's limits."""
    totals = accumulate(request.num_output_tokens for request in trace.requests)
    num_requests = sum(total <= extent.most_output_tokens for total in totals)
    return trace.first(max(1, min(num_requests, extent.most_requests)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="full traces (see benchmarks/traces/README.md); default: their bundled first requests",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="replay a few requests per trace, as a smoke test"
    )
    arguments = parser.parse_args()
    extent = _extent(arguments)
    figures: Figures = {}
    for job in track(
        list(jobs(read_traces(arguments.traces or BUNDLED), extent)), "replaying", transient=True
    ):
        figures |= job()
    report(figures, arguments.json)


def _extent(arguments: argparse.Namespace) -> Extent:
    if arguments.quick:
        return QUICK
    return DEFAULT if arguments.traces is None else WHOLE


if __name__ == "__main__":
    main()
