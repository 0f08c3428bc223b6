"""Steps of one sequence of the demo model with each number of drafted tokens, which tests of their choice replay.

python -m benchmarks.draft_steps --out tests/scheduler/speculation/recorded_steps.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.draft_lengths import fixed_lengths
from benchmarks.speculation import WORKLOADS, engine, passages, time_batch
from quire.proto.step import StepResult
from quire.scheduler.core.result_processor import ResultProcessor
from quire.scheduler.core.state.in_flight import InFlightStep
from quire.scheduler.speculation.draft_lengths import DraftLengths

# Method, workload and numbers of drafted tokens.
CASES = [
    ("eagle3", "prose", (0, 1, 2, 3)),
    ("eagle3", "quote", (0, 1, 2, 3)),
    ("ngram", "prose", (0, 2, 4, 6)),
    ("draft_model", "sampled", (0, 1, 2, 3)),
]
# Tokens that a step sampled, tokens that it drafted, and microseconds: of the step, and of drafting.
Step = tuple[int, int, int, int]


@contextmanager
def recording(steps: list[Step]) -> Iterator[None]:
    """Append the steps without prompts of an engine that may draft."""
    observe = ResultProcessor._observe_drafting

    def record(self: ResultProcessor, step: InFlightStep, result: StepResult, seconds: float) -> None:
        times = round(1e6 * seconds), round(1e6 * result.stage_times.get("draft", 0.0))
        steps.append((result.token_ids.size, int(result.num_drafted.sum()), *times))
        observe(self, step, result, seconds)

    with (
        patch.object(DraftLengths, "is_measured", lambda *_: True),
        patch.object(ResultProcessor, "_observe_drafting", record),
    ):
        yield


def record(method: str, workload: str, lengths: tuple[int, ...]) -> dict[int, list[Step]]:
    """Return the steps of one prompt with each number of drafted tokens, in order, after a run that warms up."""
    make_prompt, temperature = WORKLOADS[workload]
    recorded: dict[int, list[Step]] = {}
    with engine("demo", method) as llm:
        prompts = [make_prompt(next(passages(llm)))]
        for length in lengths:
            with fixed_lengths(length):
                time_batch(llm, prompts, temperature)
                with recording(recorded.setdefault(length, [])):
                    time_batch(llm, prompts, temperature)
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    out: Path = parser.parse_args().out
    recorded = {f"{method} {workload}": record(method, workload, lens) for method, workload, lens in CASES}
    out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
