"""MatchTime: a form that takes too long to match ends its own output, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grammars import VOCAB_SIZE, demo_library

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.block_tables import IntArray
from quire.proto.config import ModelConfig
from quire.proto.step import RowSampling
from quire.proto.structured_outputs import OutputConstraint
from quire.worker.comm.shard import Shard
from quire.worker.structured.constraint_state import ConstraintState
from quire.worker.structured.grammar import GrammarSpec
from quire.worker.structured.match_time import EXTRA_TIME_S, TIME_PER_TOKEN_S, MatchTime

FAST, SLOW = 0, 1
LETTER = demo_library().vocabulary.id_by_piece[b"a"]


class SlowMatcher:
    """A matcher that takes a part of a clock's time for each token and for each mask."""

    def __init__(self, matcher: Any, clock: list[float], taken_s: float) -> None:
        self._matcher, self._clock, self._taken_s = matcher, clock, taken_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def accept(self, token_id: int) -> bool:
        self._clock[0] += self._taken_s
        return bool(self._matcher.accept(token_id))

    def fill_mask(self, words: IntArray) -> None:
        self._clock[0] += self._taken_s
        self._matcher.fill_mask(words)

    def copy(self) -> SlowMatcher:
        return SlowMatcher(self._matcher.copy(), self._clock, self._taken_s)

    @staticmethod
    def fill_masks(matchers: Sequence[SlowMatcher], words: IntArray, places: list[int]) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            matcher.fill_mask(words[place])


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return resolve(EngineOptions("demo", device="cpu"), Machine.this()).model


def state_of(model: ModelConfig, times_s: Sequence[float], rank: int = 0) -> ConstraintState:
    """Return the constraints of rows whose matchers take these times per token and per mask."""
    compiled = demo_library().compile(GrammarSpec("regex", "a*"))
    clock = [0.0]
    state = ConstraintState(model, Shard(rank, 2, VOCAB_SIZE), len(times_s), MatchTime(lambda: clock[0]))
    for row, taken_s in enumerate(times_s):
        state.put(sequence(row, compiled))
        constraint = state._rows[row]
        assert constraint is not None
        constraint._matcher = SlowMatcher(constraint._matcher, clock, taken_s)
    return state


def sequence(row: int, compiled: bytes) -> Any:
    """Return the part of a NewSequence that its constraint is made of."""
    tokens = np.full(3, LETTER, dtype=np.int32)
    sampling = RowSampling(constraint=OutputConstraint(3, compiled))
    return SimpleNamespace(
        row=row, token_ids=tokens, sampling=sampling, takes_constraint=False, num_source_tokens=0
    )


def num_steps(state: ConstraintState, rows: list[int], limit: int = 400) -> int:
    """Return the number of steps until a row fails; `limit` if none does."""
    index = np.array(rows, dtype=np.int32)
    for step in range(limit):
        state.masks(index, lambda first, count: [])
        if state._failures:
            return step
        state.append(index, torch.full((len(rows),), LETTER, dtype=torch.int32))
    return limit


def test_row_beyond_its_time_fails_and_the_others_go_on(model: ModelConfig) -> None:
    state = state_of(model, [TIME_PER_TOKEN_S / 4, 0.02])
    num = num_steps(state, [FAST, SLOW])
    assert num <= EXTRA_TIME_S / 0.02
    (failed,) = state.take_failures()
    assert failed.row == SLOW
    assert "to match" in failed.reason
    assert num_steps(state, [FAST, SLOW], 50) == 50
    assert state._rows[FAST] is not None
    assert state._rows[SLOW] is None


def test_rows_within_their_time_are_never_failed(model: ModelConfig) -> None:
    """Also after a mask that takes long once, and beside a row that makes steps slow and has failed."""
    state = state_of(model, [TIME_PER_TOKEN_S / 3, 0.02])
    constraint = state._rows[FAST]
    assert constraint is not None
    constraint.extra_time_s = EXTRA_TIME_S * 0.9
    assert num_steps(state, [FAST, SLOW]) < 10
    state.take_failures()
    assert num_steps(state, [FAST, SLOW]) == 400


def test_only_rank_0_leaves_out_a_mask(model: ModelConfig) -> None:
    state = state_of(model, [0.5], rank=1)
    assert num_steps(state, [FAST], 20) == 20
    assert state._rows[FAST] is not None


def test_fork_has_the_time_of_its_parent(model: ModelConfig) -> None:
    state = state_of(model, [0.02])
    index = np.array([FAST], dtype=np.int32)
    for _ in range(2):
        state.masks(index, lambda first, count: [])
        state.append(index, torch.tensor([LETTER], dtype=torch.int32))
    state.masks(index, lambda first, count: [])
    parent = state._rows[FAST]
    assert parent is not None
    assert 0 < parent.extra_time_s < EXTRA_TIME_S
    forked = parent.fork([LETTER] * 3)
    assert forked is not None
    assert forked.extra_time_s == parent.extra_time_s
