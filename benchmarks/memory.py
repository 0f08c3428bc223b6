"""What paging, sharing and prefix caching do for KV memory, replayed from traces in simulated time.

    python -m benchmarks.memory [--traces DIR] [--quick] --json benchmarks/results/memory.json

The code that serves decides everything (benchmarks.replay says what is made up). Every trace arrives in the time in
which its prompts and KV reads alone keep the simulated machine LOAD busy. Hit rates are measured on all requests,
waste and sharing on the first (class Extent); each figure's note says on how many.

- memory.waste.<trace>.<block size>: share of the KV slots of held blocks that no token is in, averaged over time;
  beside it what contiguous memory would waste on the same lengths: reserved for the longest request
  (contiguous_max), and for the prompt and the next power of two of the answer (contiguous_pow2).
- memory.hit_rate.<trace>.<blocks>: share of prompt tokens found in a pool of so many blocks, which running sequences
  and their answers need as well; answers are cached, but being made up no later prompt has them. `alone` is the same
  with one prompt at a time and no answers; `lru` is what a plain least-recently-used cache of blocks finds then, as a
  share of blocks, computed here from the hashes alone. Without <blocks>: in the largest pool.
- memory.saved.<n or beam>.<width>.<lengths>: share of the blocks of all tables that sharing saves, at block size 16.

The lengths `alpaca` and `sharegpt` are drawn: log-normal around the means of the PagedAttention paper (Kwon et al.,
SOSP 2023), of which the notes say what it measured on its own. Beam searches choose from made-up candidates: the
token of rank r has probability ~ r ** -s, with s between 1 and 6 for each beam and position. How much beams share
hangs on how alike they are, so two cases are measured: at a position the beams of a request have the same s half of
the time, or always (`related`).
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
from quire.proto.sampling import SamplingParams

BUNDLED = Path(__file__).parent / "traces"
LOAD = 0.75
POOL_TOKENS = 393_216  # what some 50 GB hold of the simulated model's KV
BLOCK_SIZES = (8, 16, 32, 64)
POOL_BLOCKS = (1_000, 4_000, 16_000, 64_000)
WIDTHS = (2, 4, 6)
SHARING_LENGTHS = ("alpaca", "sharegpt", "lengths_sharegpt_8k")

# The paper's means of prompt and answer, and the savings it found for widths 2 to 6.
ALPACA, SHAREGPT = (19.31, 58.45), (161.31, 337.99)
PAPER_SAVED = {
    ("n", "alpaca"): "paper: 6.1 to 9.8 %",
    ("n", "sharegpt"): "paper: 16.2 to 30.5 %",
    ("beam", "alpaca"): "paper: 37.6 to 55.2 %",
    ("beam", "sharegpt"): "paper: 44.3 to 66.3 %",
}

Figures = dict[str, Figure]
Job = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is replayed.

    Attributes:
        most_requests: of each trace.
        most_output_tokens: of each trace where memory is measured, over its requests: averages settle long before
            the end. Hit rates depend on all that came before, and are measured on all of it.
        num_beams: of each replay that measures sharing, over its requests; answers of parallel sampling: 10 times
            as many.
    """

    most_requests: int
    most_output_tokens: int
    num_beams: int


QUICK = Extent(8, 2_000, num_beams=4)
DEFAULT = Extent(300, 100_000, num_beams=90)
WHOLE = Extent(1_000_000, 400_000, num_beams=180)


def at_load(trace: Trace, answers: int = 1) -> Trace:
    """The trace at LOAD, when each request asks for so many answers."""
    return trace.over(Roofline().busy_s(trace) * answers / LOAD)


def measure_waste(trace: Trace, block_size: int) -> Figures:
    outcome = replay(at_load(trace), POOL_TOKENS // block_size, block_size)
    note = f"{len(trace.requests)} requests, {outcome.mean_running:.0f} running; paper: under 4 %"
    return {f"memory.waste.{trace.name}.{block_size}": Figure(100 * outcome.waste, "%", note)}


def contiguous_waste(trace: Trace) -> Figures:
    """What is reserved and not used when each request's memory is one piece, held while its answer grows."""
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
        f"{name}.{column}": Figure(100 * served.hit_rate, "%", f"{note}, answers cached too"),
        f"{name}.alone.{column}": Figure(100 * alone.hit_rate, "%", "prompts alone, share of tokens"),
        f"{name}.lru.{column}": Figure(
            100 * lru_hit_rate(trace, num_blocks), "%", "prompts alone, share of blocks"
        ),
    }
    if num_blocks == POOL_BLOCKS[-1]:
        figures[name] = figures[f"{name}.{column}"]
    return figures


def lru_hit_rate(trace: Trace, num_blocks: int) -> float:
    """Share of the prompts' blocks that a least-recently-used cache has, from the first on without a gap.

    A prompt's last blocks are evicted before its first.
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


def measure_saved_by_answers(width: int, lengths: Trace, num_answers: int) -> Figures:
    trace = lengths.first(max(2, num_answers // width))
    outcome = replay(at_load(trace, width), POOL_TOKENS // 16, answers=SamplingParams(n=width))
    return {f"memory.saved.n.{width}.{trace.name}": Figure(100 * outcome.saved, "%", _saved_note("n", trace))}


def measure_saved_by_beams(width: int, lengths: Trace, num_beams: int, relatedness: float) -> Figures:
    trace = lengths.first(max(2, num_beams // width))
    candidates = ZipfCandidates(relatedness=relatedness)
    answers = SamplingParams(beam_width=width)
    outcome = replay(at_load(trace, width), POOL_TOKENS // 16, answers=answers, candidates=candidates)
    name = f"memory.saved.beam.{width}.{trace.name}" + (".related" if relatedness == 1.0 else "")
    return {name: Figure(100 * outcome.saved, "%", _saved_note("beam", trace))}


def _saved_note(kind: str, trace: Trace) -> str:
    num_requests, paper = len(trace.requests), PAPER_SAVED.get((kind, trace.name))
    return f"{num_requests} requests, lengths drawn; {paper}" if paper else f"{num_requests} requests"


def jobs(traces: list[Trace], extent: Extent) -> Iterator[Job]:
    """All that is measured, a replay or two each."""
    for trace in traces:
        if trace.shares_prefixes:
            whole = trace.first(extent.most_requests)
            yield from (partial(measure_hits, whole, num_blocks) for num_blocks in POOL_BLOCKS)
    drawn = [draw_lengths("alpaca", *ALPACA, 2000), draw_lengths("sharegpt", *SHAREGPT, 2000)]
    lengths = [cut(trace, extent) for trace in (*drawn, *traces)]
    for trace in lengths:
        yield partial(contiguous_waste, trace)
        yield from (partial(measure_waste, trace, block_size) for block_size in BLOCK_SIZES)
    for trace in lengths:
        if trace.name in SHARING_LENGTHS:
            for width in WIDTHS:
                yield partial(measure_saved_by_answers, width, trace, 10 * extent.num_beams)
                for relatedness in (0.5, 1.0):
                    yield partial(measure_saved_by_beams, width, trace, extent.num_beams, relatedness)


def cut(trace: Trace, extent: Extent) -> Trace:
    """The first requests, as far as the extent goes."""
    totals = accumulate(request.num_output_tokens for request in trace.requests)
    num_requests = sum(total <= extent.most_output_tokens for total in totals)
    return trace.first(max(1, min(num_requests, extent.most_requests)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="whole traces (see benchmarks/traces/README.md); default: the first requests, which are bundled",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a few requests of each: does it run?")
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
