"""DraftLengths on recorded steps of the demo model: steps draft as many tokens as make them fast.

`python -m benchmarks.draft_steps` records one sequence of each case with fixed numbers of drafted tokens; here, on
two cores that other work kept busy. A replay takes each step from the recording with the chosen number, at the same
place of the text. Of a step that other work delayed, at most twice the median counts in the result.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from quire.scheduler.speculation.draft_lengths import DraftLengths

PROMPT_LEN = 40

# Tokens that a step sampled, tokens that it drafted, and microseconds: of the step, and of drafting.
Step = list[int]

RECORDED: dict[str, dict[str, list[Step]]] = json.loads(
    (Path(__file__).parent / "recorded_steps.json").read_text()
)


class Recording:
    """The steps of one sequence with each of some numbers of drafted tokens."""

    def __init__(self, case: str) -> None:
        self._steps = {int(length): steps for length, steps in RECORDED[case].items()}
        self._starts = {
            length: list(itertools.accumulate((step[0] for step in steps), initial=0))
            for length, steps in self._steps.items()
        }
        self._medians = {length: median(step[2] for step in steps) for length, steps in self._steps.items()}
        self.max_len = max(self._steps)
        self.num_tokens = min(starts[-1] for starts in self._starts.values())

    def step_at(self, position: int, num_drafted: int) -> tuple[Step, float]:
        """Return a step at a position of the text, and the time that counts.

        It is that with the least recorded number of drafted tokens that is not below `num_drafted`.
        """
        length = min(length for length in self._steps if length >= num_drafted)
        index = bisect.bisect_left(self._starts[length], position)
        step = self._steps[length][min(index, len(self._steps[length]) - 1)]
        num_sampled, num_own, *times = step
        own = [min(num_sampled, 1 + num_drafted), min(num_own, num_drafted), *times]
        return own, self._counted(length, step)

    def _counted(self, length: int, step: Step) -> float:
        return min(step[2], 2 * self._medians[length])

    def speed(self, length: int) -> float:
        """Return the tokens per microsecond of the steps with one number of drafted tokens."""
        steps = self._steps[length]
        return sum(step[0] for step in steps) / sum(self._counted(length, step) for step in steps)

    @property
    def best_speed(self) -> float:
        return max(map(self.speed, self._steps))


def replay(recording: Recording, lengths: DraftLengths, sequence: int) -> float:
    """Return the tokens per microsecond of a sequence with chosen numbers of drafted tokens."""
    row, first_steps, position, spent = np.zeros(1, np.intp), np.array([sequence]), 0, 0.0
    step_ids = itertools.count()
    while position < recording.num_tokens:
        limits = np.array([recording.num_tokens - position - 1], np.int32)
        num_tokens = np.array([PROMPT_LEN + position], np.int32)
        chosen = None
        if lengths.is_due(1, sequence):
            chosen = lengths.choose(row, first_steps, num_tokens, limits, 100)
        num_planned = 0 if chosen is None else int(chosen[0])
        (num_sampled, num_drafted, step_us, draft_us), counted_us = recording.step_at(position, num_planned)
        is_measured = lengths.is_measured(next(step_ids))
        if chosen is None:
            if is_measured:
                lengths.observe_plain(1, 1e-6 * step_us)
        else:
            lengths.observe_drafted(1, num_sampled, 1e-6 * step_us, 1e-6 * draft_us, num_drafted, num_drafted)
            accepted = np.array([num_sampled - 1], np.int32)
            lengths.observe(row, np.array([num_drafted], np.int32), accepted)
        position += num_sampled
        spent += counted_us
    return position / spent


def speeds(cases: list[str], num_sequences: int) -> Iterator[tuple[str, float, float]]:
    """Replay sequences of each case in turn; yield the speed of each, relative to no drafts and to the best."""
    recordings = [Recording(case) for case in cases]
    lengths = DraftLengths(1, max(recording.max_len for recording in recordings))
    sequence = 0
    for case, recording in zip(cases, recordings, strict=True):
        for _ in range(num_sequences):
            sequence += 1
            speed = replay(recording, lengths, sequence)
            yield case, speed / recording.speed(0), speed / recording.best_speed


# N-grams match seldom and then long, so that the recorded numbers of drafted tokens differ by little but noise.
@pytest.mark.parametrize(
    ("case", "least"),
    [("eagle3 prose", 0.97), ("eagle3 quote", 0.98), ("ngram prose", 0.88), ("draft_model sampled", 0.93)],
)
def test_chosen_numbers_are_about_as_fast_as_the_best_one(case: str, least: float) -> None:
    results = list(speeds([case], 12))
    assert np.mean([to_best for _, _, to_best in results[2:]]) > least
    assert min(to_plain for _, to_plain, _ in results) > 0.95
    assert np.mean([to_plain for _, to_plain, _ in results]) > 0.98


def test_drafts_follow_the_text() -> None:
    results = list(speeds(["eagle3 quote", "eagle3 prose", "eagle3 quote", "eagle3 prose"], 8))
    assert np.mean([to_best for case, _, to_best in results if case == "eagle3 prose"]) > 0.95
    assert np.mean([to_plain for case, to_plain, _ in results if case == "eagle3 quote"]) > 0.98
