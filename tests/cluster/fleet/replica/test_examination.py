"""Examination: which late ranks have failed, with a clock and answers of the test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.cluster.fleet.replica.examination import ANSWER_TIMEOUT_S, COMPILE_TIMEOUT_S, Examination
from quire.proto.replica_status import COMPILE_STAGE

FAILED_S = 5.0


class Ranks:
    """Two ranks that are late with a step.

    Attributes:
        stages: rank |-> the stage that it answers; a rank that is missing does not answer.
        now: seconds since the begin of the step, also the clock.
        num_questions: times that the ranks were asked.
    """

    def __init__(self, **stages: str) -> None:
        self.stages = {int(rank.removeprefix("rank_")): stage for rank, stage in stages.items()}
        self.now = 0.0
        self.num_questions = 0
        self.examination = Examination(self.ask, FAILED_S, lambda: self.now)

    def ask(self, ranks: Sequence[int]) -> Ranks:
        self.num_questions += 1
        return self

    def take_answers(self) -> dict[int, str]:
        return dict(self.stages)

    def failed_at(self, now: float, late: Sequence[int] = (0, 1)) -> list[int]:
        self.now = now
        return self.examination.find_failed(late, now)


def test_late_ranks_that_answer_fail_when_the_step_is_overdue() -> None:
    ranks = Ranks(rank_0="forward", rank_1="device")
    assert [ranks.failed_at(now) for now in (0.5, 1.0, 4.9)] == [[], [], []]
    assert ranks.num_questions == 1
    assert ranks.failed_at(5.0) == [0, 1]
    assert ranks.num_questions == 2
    assert ranks.examination.stages == {0: "forward", 1: "device"}


def test_silent_rank_fails_before_the_step_is_overdue() -> None:
    ranks = Ranks(rank_0="forward")
    assert ranks.failed_at(0.5) == []
    assert ranks.failed_at(0.4 + ANSWER_TIMEOUT_S) == []
    assert ranks.failed_at(0.5 + ANSWER_TIMEOUT_S) == [1]
    assert 1 not in ranks.examination.stages


def test_rank_that_falls_silent_is_found_after_the_deadline() -> None:
    ranks = Ranks(rank_0="forward", rank_1="forward")
    assert ranks.failed_at(0.5) == []
    del ranks.stages[1]
    assert ranks.failed_at(FAILED_S) == []
    assert ranks.failed_at(FAILED_S + ANSWER_TIMEOUT_S) == [1]
    assert 1 not in ranks.examination.stages


def test_rank_that_compiles_extends_the_deadline() -> None:
    """A compilation of 7 s, and a step that ends 2 s later: no rank has failed."""
    ranks = Ranks(rank_0="device", rank_1=COMPILE_STAGE)
    assert [ranks.failed_at(now) for now in (0.5, 5.0, 6.0)] == [[], [], []]
    ranks.stages[1] = "forward"
    assert [ranks.failed_at(now) for now in (7.0, 9.0)] == [[], []]


def test_rank_that_hangs_after_it_compiled_fails() -> None:
    ranks = Ranks(rank_0="device", rank_1=COMPILE_STAGE)
    assert ranks.failed_at(5.0) == []
    ranks.stages[1] = "forward"
    assert ranks.failed_at(9.9) == []
    assert ranks.failed_at(10.0) == [0, 1]


def test_compilation_that_began_after_the_first_question_is_seen() -> None:
    ranks = Ranks(rank_0="forward", rank_1="forward")
    assert ranks.failed_at(0.5) == []
    ranks.stages[0] = COMPILE_STAGE
    assert ranks.failed_at(5.0) == []


def test_rank_that_replied_extends_nothing() -> None:
    ranks = Ranks(rank_0=COMPILE_STAGE, rank_1="forward")
    assert ranks.failed_at(1.0) == []
    assert ranks.failed_at(5.0, late=[1]) == [1]


@pytest.mark.parametrize("step_s", [0.1, 1.0, 4.0])
def test_compilation_without_end_fails(step_s: float) -> None:
    ranks = Ranks(rank_0="device", rank_1=COMPILE_STAGE)
    now = 0.0
    while not (failed := ranks.failed_at(now)):
        now += step_s
        assert now < 2 * COMPILE_TIMEOUT_S
    assert failed == [0, 1]
    assert now >= COMPILE_TIMEOUT_S
