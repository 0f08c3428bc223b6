"""Speculative decoding on the demo model: acceptance, tokens per step, and speed with and without drafts.

    python -m benchmarks.speculation --json benchmarks/results/speculation.json

Workloads, greedy unless noted:

- `quote`: a passage, and its beginning again, as for edits and summaries, which repeat what the prompt contains;
- `prose`: the beginning of a passage, which the model continues;
- `sampled`: as prose, at temperature 1, where little repeats.

With --fixed N, every step drafts N tokens per sequence, whatever it costs.

Each runs with 1 and with 16 sequences at once. One engine decodes with drafts and one without; they take turns, batch
by batch, so that both see the same machine. Ratios are medians over these pairs. Outputs are compared: they must be
the same.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

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


# name |-> prompt of a passage, and temperature
WORKLOADS = {"quote": (quote, 0.0), "prose": (prose, 0.0), "sampled": (prose, 1.0)}


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


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of an engine."""

    num_draft_tokens: int
    num_accepted: int

    @staticmethod
    def of(llm: LLM) -> Counts:
        stats = engine_of(llm).scheduler.stats
        return Counts(stats.num_draft_tokens, sum(stats.num_accepted))


def engine_of(llm: LLM) -> InProcessEngine:
    engine = llm._engine
    assert isinstance(engine, InProcessEngine)
    return engine


def measure(plain: LLM, drafted: LLM, workload: str, batch_size: int, num_pairs: int) -> dict[str, Figure]:
    """Run pairs of batches, after one that warms up."""
    make_prompt, temperature = WORKLOADS[workload]
    source, ratios, rates = passages(plain), list[float](), list[float]()
    before = Counts.of(drafted)
    for pair in range(num_pairs + 1):
        prompts = [make_prompt(next(source)) for _ in range(batch_size)]
        order = (plain, drafted) if pair % 2 else (drafted, plain)
        runs = {llm is drafted: time_batch(llm, prompts, temperature) for llm in order}
        assert runs[True][1] == runs[False][1], "outputs with and without drafts differ"
        if pair == 0:
            before = Counts.of(drafted)
            continue
        ratios.append(runs[False][0] / runs[True][0])
        rates.append(batch_size * NUM_TOKENS / runs[True][0])
    return figures(before, Counts.of(drafted), ratios, rates, num_pairs * batch_size * NUM_TOKENS)


def figures(
    before: Counts, after: Counts, ratios: list[float], rates: list[float], num_tokens: int
) -> dict[str, Figure]:
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted - before.num_accepted
    spread = f"{len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    return {
        "speedup": Figure(median(ratios), "", spread),
        "tokens_per_s": Figure(median(rates), "tokens/s", "with drafts"),
        "acceptance": Figure(num_accepted / max(1, num_drafted), "", f"of {num_drafted} drafted tokens"),
        "tokens_per_step": Figure(num_tokens / (num_tokens - num_accepted), "tokens", "per sequence"),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="model directory (default: the demo model)")
    parser.add_argument("--methods", type=names_from(METHODS), default=[*METHODS], metavar="NAME,...")
    parser.add_argument("--workloads", type=names_from(WORKLOADS), default=[*WORKLOADS], metavar="NAME,...")
    parser.add_argument("--pairs", type=int, default=8, help="of batches (default: %(default)s)")
    parser.add_argument("--fixed", type=int, metavar="N", help="drafted tokens of every step and sequence")
    arguments = parser.parse_args()
    found: dict[str, Figure] = {}
    with ExitStack() as stack:
        stack.enter_context(fixed_lengths(arguments.fixed))
        plain = stack.enter_context(engine(arguments.model, None))
        for method in arguments.methods:
            with engine(arguments.model, method) as drafted:
                for workload, size in itertools.product(arguments.workloads, BATCH_SIZES):
                    name = f"speculation.{method}.{workload}.{size}"
                    measured = measure(plain, drafted, workload, size, arguments.pairs)
                    found |= {f"{name}.{key}": figure for key, figure in measured.items()}
    report(found, arguments.json)


if __name__ == "__main__":
    main()
