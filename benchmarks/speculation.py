"""Speculative decoding on the demo model: acceptance, tokens per step, and speed with and without drafts.

    python -m benchmarks.speculation --json benchmarks/results/speculation.json

Workloads, greedy unless noted:

- `quote`: a passage, and its beginning again, as for edits and summaries, which repeat what the prompt contains;
- `prose`: the beginning of a passage, which the model continues;
- `sampled`: as prose, at temperature 1, where little repeats;
- `mixed`: quotes and prose at random, whose drafts are worth different things.

With --fixed N, every step drafts N tokens per sequence, whatever it costs.

Each runs with 1 and with 16 sequences at once. One engine decodes with drafts and one without; they take turns, batch
by batch, so that both see the same machine. Ratios are medians over these pairs, of several engines: two of the same
kind differ by 4 % and more, by where their memory is. The standard error of a median is that of the engines' medians.
Outputs are compared: they must be the same.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev

from benchmarks.common import Figure, make_parser, median, names_from, report
from benchmarks.draft_lengths import fixed_lengths
from quire import LLM, SamplingParams
from quire.cluster.offline.in_process import InProcessEngine

TEXTS = Path(__file__).parent / "held_out"
PASSAGE_LEN, REPEATED_LEN, NUM_TOKENS = 280, 40, 200  # tokens
BATCH_SIZES = 1, 16
METHODS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 6},
    "eagle3": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 6},
}

Prompts = list[list[int]]


def passages(llm: LLM) -> Iterator[list[int]]:
    """Yield passages of PASSAGE_LEN tokens of texts that the model was not trained on, without end."""
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.encode(path.read_text()) for path in sorted(TEXTS.glob("*.txt"))]
    start = 0
    while True:
        for text in texts:
            at = start % (len(text) - PASSAGE_LEN)
            yield text[at : at + PASSAGE_LEN]
        start += PASSAGE_LEN


def quote(passage: list[int]) -> list[int]:
    return passage + passage[:REPEATED_LEN]


def prose(passage: list[int]) -> list[int]:
    return passage[:REPEATED_LEN]


def mixed(passage: list[int]) -> list[int]:
    return quote(passage) if passage[0] % 2 else prose(passage)


# name |-> prompt of a passage, and temperature
WORKLOADS = {"quote": (quote, 0.0), "prose": (prose, 0.0), "sampled": (prose, 1.0), "mixed": (mixed, 0.0)}


@contextmanager
def engine(model: str, method: str | None) -> Iterator[LLM]:
    config = None if method is None else json.dumps(METHODS[method])
    with LLM(model, device="cpu", speculative_config=config, prefix_caching=False) as llm:
        yield llm


def time_batch(llm: LLM, prompts: Prompts, temperature: float) -> tuple[float, list[list[int]]]:
    """Return the seconds of a batch, and its outputs."""
    params = SamplingParams(
        temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1, detokenize=False
    )
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]


@dataclass(slots=True)
class Measured:
    """Results of the pairs of batches of all engines.

    Attributes:
        ratios: the time without drafts over that with drafts, of each pair, by engines.
        rates: tokens/s with drafts.
        num_tokens, num_drafted, num_accepted: with drafts.
    """

    ratios: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, plain_s: float, drafted_s: float, num_tokens: int) -> None:
        self.ratios[-1].append(plain_s / drafted_s)
        self.rates.append(num_tokens / drafted_s)
        self.num_tokens += num_tokens

    def figures(self) -> dict[str, Figure]:
        ratios = [*itertools.chain.from_iterable(self.ratios)]
        spread = f"{len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
        if len(self.ratios) > 1:
            error = stdev(map(median, self.ratios)) / math.sqrt(len(self.ratios))
            spread += f", standard error {error:.3f}"
        acceptance = self.num_accepted / max(1, self.num_drafted)
        return {
            "speedup": Figure(median(ratios), "", spread),
            "tokens_per_s": Figure(median(self.rates), "tokens/s", "with drafts"),
            "acceptance": Figure(acceptance, "", f"of {self.num_drafted} drafted tokens"),
            "tokens_per_step": Figure(
                self.num_tokens / (self.num_tokens - self.num_accepted), "tokens", "per sequence"
            ),
        }


def num_drafts(llm: LLM) -> tuple[int, int]:
    """Return the drafted tokens of an engine so far, and the accepted ones."""
    stats = engine_of(llm).scheduler.stats
    return stats.num_draft_tokens, sum(stats.num_accepted)


def engine_of(llm: LLM) -> InProcessEngine:
    engine = llm._engine
    assert isinstance(engine, InProcessEngine)
    return engine


def run_pairs(
    plain: LLM,
    drafted: LLM,
    case: tuple[str, int],
    source: Iterator[list[int]],
    num_pairs: int,
    measured: Measured,
) -> None:
    """Run pairs of batches of a case, after one that warms up, and add them to what was measured."""
    workload, batch_size = case
    make_prompt, temperature = WORKLOADS[workload]
    before = num_drafts(drafted)
    measured.ratios.append([])
    for pair in range(num_pairs + 1):
        prompts = [make_prompt(next(source)) for _ in range(batch_size)]
        order = (plain, drafted) if pair % 2 else (drafted, plain)
        runs = {llm is drafted: time_batch(llm, prompts, temperature) for llm in order}
        assert runs[True][1] == runs[False][1], "outputs with and without drafts differ"
        if pair == 0:
            before = num_drafts(drafted)
        else:
            measured.add(runs[False][0], runs[True][0], batch_size * NUM_TOKENS)
    after = num_drafts(drafted)
    measured.num_drafted += after[0] - before[0]
    measured.num_accepted += after[1] - before[1]


def measure(
    model: str, method: str, workload: str, num_pairs: int, num_engines: int
) -> Iterator[tuple[int, Measured]]:
    """Measure as many engines with a method as without, new ones for each workload; yield batch sizes and results."""
    found = {batch_size: Measured() for batch_size in BATCH_SIZES}
    num_own_pairs = max(1, num_pairs // num_engines)
    source: Iterator[list[int]] | None = None
    for number in range(num_engines):
        with ExitStack() as stack:
            # Each is loaded first by turns.
            engines = {
                name: stack.enter_context(engine(model, name))
                for name in ((None, method) if number % 2 else (method, None))
            }
            source = source or passages(engines[None])
            for batch_size, measured in found.items():
                case = workload, batch_size
                run_pairs(engines[None], engines[method], case, source, num_own_pairs, measured)
    yield from found.items()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="model directory (default: the demo model)")
    parser.add_argument("--methods", type=names_from(METHODS), default=[*METHODS], metavar="NAME,...")
    parser.add_argument("--workloads", type=names_from(WORKLOADS), default=[*WORKLOADS], metavar="NAME,...")
    parser.add_argument(
        "--pairs", type=int, default=8, help="of batches, of all engines (default: %(default)s)"
    )
    parser.add_argument("--engines", type=int, default=4, help="of each kind (default: %(default)s)")
    parser.add_argument("--fixed", type=int, metavar="N", help="drafted tokens of every step and sequence")
    arguments = parser.parse_args()
    found: dict[str, Figure] = {}
    with fixed_lengths(arguments.fixed):
        for method, workload in itertools.product(arguments.methods, arguments.workloads):
            for size, measured in measure(
                arguments.model, method, workload, arguments.pairs, arguments.engines
            ):
                name = f"speculation.{method}.{workload}.{size}"
                found |= {f"{name}.{key}": figure for key, figure in measured.figures().items()}
    report(found, arguments.json)


if __name__ == "__main__":
    main()
