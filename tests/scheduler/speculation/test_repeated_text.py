"""N-grams draft where the newest tokens of a sequence occur before, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import small_config, submit

from quire.proto.config import SpeculativeConfig
from quire.proto.step import StepResult
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.speculation.draft_switch import DraftSwitch, ends_repeated, min_repeated_len

NGRAM = SpeculativeConfig("ngram", 3)


def is_repeated(token_ids: list[int], min_len: int = 4) -> bool:
    return ends_repeated(np.array(token_ids, np.int32).tobytes(), min_len)


@pytest.mark.parametrize(
    "token_ids",
    [
        [5, 6, 7, 8, 9, 5, 6, 7, 8],
        [5, 6, 7, 8, 5, 6, 7, 8],
        [2, 3] * 3,
        [9] * 5,
        [1 << 17, 3, 4, 5, 1 << 17, 3, 4, 5],
    ],
)
def test_repeated_ends_are_found(token_ids: list[int]) -> None:
    assert is_repeated(token_ids)


@pytest.mark.parametrize(
    "token_ids", [[5, 6], [5, 6, 7, 8], [9] * 4, [5, 6, 7, 8, 9, 6, 7, 8], [5, 6, 7, 8, 5, 6, 7, 8, 9]]
)
def test_other_ends_are_not(token_ids: list[int]) -> None:
    assert not is_repeated(token_ids)


def test_length_is_that_of_the_shortest_match_and_at_least_four() -> None:
    assert min_repeated_len(NGRAM) == 4
    assert min_repeated_len(replace(NGRAM, prompt_lookup_min=6)) == 6
    assert min_repeated_len(replace(NGRAM, method="draft_model")) == 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_only_rows_that_repeat_text_draft_ngrams(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """One row repeats itself from its ninth token on, over the ends of blocks; the other does not."""
    monkeypatch.setattr(DraftSwitch, "is_on", lambda *_: True)
    config = replace(small_config(max_steps_in_flight=1), speculative=replace(NGRAM, method=method))
    scheduler = Scheduler(config)
    for handle in range(2):
        scheduler.add(b"gateway", submit(handle, [2 + handle, 4, 5], max_tokens=40, ignore_eos=True), 0.0)
    drafting = set[tuple[int, int]]()  # row, and output tokens that are known
    for place in range(20):
        plan = scheduler.schedule(float(place))
        assert plan is not None
        assert plan.keeps_states  # as for all methods but heads
        drafting |= {(row, place) for row in plan.draft_rows.tolist()}
        token_ids = np.array([10 + place % 8, 20 + place], np.int32)
        scheduler.apply(StepResult(plan.step_id, plan.epoch, 0, token_ids), float(place))
    everywhere = {(row, place) for row in range(2) for place in range(1, 20)}
    assert drafting == ({(0, place) for place in range(12, 20)} if method == "ngram" else everywhere)
