"""DraftLoad: runs of steps with drafts begin where there is credit, and end where they lose."""

from __future__ import annotations

import numpy as np
import pytest

from quire.scheduler.speculation.draft_budget import DraftBudget
from quire.scheduler.speculation.draft_load import DraftLoad

PLAIN_S, DRAFT_S = 1e-3, 1e-4


class Steps:
    """Steps of one row, each with three drafted tokens if it may draft."""

    def __init__(self) -> None:
        self.budget = DraftBudget()
        self.load = DraftLoad(self.budget)
        self.num_started = 1
        self.num_plain = 0  # since the last step with drafts

    def run(self, num_steps: int, num_gained: int, cost: float = 2.0, num_drafted: int = 3) -> int:
        """Return the number of steps with drafts.

        Args:
            num_gained: tokens of such a step.
            cost: its time, relative to a step without drafts.
        """
        count = 0
        for _ in range(num_steps):
            is_due = self.load.is_due(self.num_started)
            has_drafts = is_due and self.load.may_draft
            if is_due:
                self.load.on_choice(has_drafts=has_drafts)
            if has_drafts:
                draft_s = DRAFT_S if num_drafted else 0.0
                self.load.observe_drafted(1, num_drafted, num_drafted, num_gained, cost * PLAIN_S, draft_s)
                count, self.num_plain = count + 1, 0
            else:
                # The first steps after drafts take longer, until caches hold their data again.
                self.load.observe_plain(1, PLAIN_S * (1.3 if self.num_plain < 3 else 1.0))
                self.num_plain += 1
        return count


@pytest.fixture
def steps() -> Steps:
    steps = Steps()
    assert steps.run(32, 1) == 0  # measures steps without drafts
    steps.load._num_cold_drafts = 0
    steps.budget.add(2.0 - steps.budget._credit)  # for one run
    return steps


def test_drafts_that_pay_go_on(steps: Steps) -> None:
    assert steps.run(1000, 3) > 970


def test_drafts_that_do_not_pay_end_after_their_stake(steps: Steps) -> None:
    assert steps.run(100, 1) <= 3


def test_drafts_that_cease_to_pay_end_soon(steps: Steps) -> None:
    steps.run(200, 3)
    assert steps.run(200, 1) < 20


def test_new_sequences_draft_first(steps: Steps) -> None:
    steps.run(100, 1)
    assert steps.run(480, 3) == 0  # credit is kept for them
    steps.num_started += 1
    assert steps.run(10, 3) == 10


def test_sequences_draft_again_in_time(steps: Steps) -> None:
    steps.run(100, 1)
    assert steps.run(800, 3) > 100


def test_nothing_to_draft_costs_one_step(steps: Steps) -> None:
    assert steps.run(10, 1, cost=1.3, num_drafted=0) == 1


def test_runs_with_gains_go_on_where_there_is_nothing_to_draft(steps: Steps) -> None:
    steps.run(4, 4)
    assert steps.run(10, 1, cost=1.3, num_drafted=0) == 10


def test_slower_steps_after_drafts_are_charged_and_not_taken_as_usual(steps: Steps) -> None:
    for _ in range(40):
        steps.run(100, 1)
    assert steps.load.relative_times(1, np.array([3.0]), np.array([3]))[0] == pytest.approx(2.0, rel=0.05)
    # 4,000 steps earn 30. Runs have two steps, which lose one each, and 0.9 after them: otherwise 30 steps.
    assert steps.run(4000, 1) <= 26


def test_tokens_of_a_pause_are_paid_for_by_what_the_run_saves(steps: Steps) -> None:
    steps.load.on_choice(has_drafts=True)
    steps.load.observe_drafted(1, 3, 3, 3, 8 * PLAIN_S, 7 * PLAIN_S)
    assert steps.run(50, 3) == 50


def test_tokens_of_a_pause_count_in_runs_that_do_not_pay(steps: Steps) -> None:
    steps.load.on_choice(has_drafts=True)
    steps.load.observe_drafted(1, 3, 3, 1, 8 * PLAIN_S, 7 * PLAIN_S)
    steps.run(4, 1)
    steps.num_started += 1
    assert steps.run(600, 3) == 0


def test_steps_in_flight_when_a_run_ends_are_charged(steps: Steps) -> None:
    steps.run(10, 1)
    before = steps.budget._credit
    steps.load.observe_drafted(1, 3, 3, 1, 2 * PLAIN_S, DRAFT_S)
    assert steps.budget._credit == pytest.approx(before - 1.0, abs=0.2)


def test_first_drafts_of_an_engine_are_not_charged() -> None:
    steps = Steps()
    steps.run(32, 1)
    before = steps.budget._credit
    assert steps.run(4, 1, cost=9.0) == 4
    assert steps.budget._credit == before
    assert steps.run(10, 3) == 10


def test_slow_first_steps_of_a_run_do_not_end_it(steps: Steps) -> None:
    """Caches do not hold the code and the data of drafts yet."""
    steps.run(200, 3)
    steps.run(20, 1)
    steps.num_started += 1
    assert steps.run(3, 2, cost=3.0) == 3
    assert steps.run(50, 3) == 50


def test_runs_that_compute_much_first_wait_for_more_credit(steps: Steps) -> None:
    steps.load.on_choice(has_drafts=True, num_pending=300)
    steps.load.observe_drafted(1, 3, 3, 1, 5 * PLAIN_S, 4 * PLAIN_S)
    steps.run(20, 1)
    steps.budget.add(3.5 - steps.budget._credit)
    assert steps.load.may_compute(0)
    assert not steps.load.may_compute(300)
    steps.budget.add(3.0)
    assert steps.load.may_compute(300)
