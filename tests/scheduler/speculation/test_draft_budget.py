"""DraftBudget: what drafts lose is a small part of the time of steps without them."""

from __future__ import annotations

from quire.scheduler.speculation.draft_budget import DraftBudget


def num_runs(budget: DraftBudget, num_lost: float, num_steps: int) -> int:
    """Begin a run of drafts that loses so much whenever there is credit for it; return the number of runs."""
    count = 0
    for _ in range(num_steps):
        if budget.allows(num_lost):
            budget.add(-num_lost)
            count += 1
        budget.add_plain_steps(1)
    return count


def test_steps_lose_less_than_a_hundredth_to_drafts_that_cost() -> None:
    budget = DraftBudget()
    assert budget.allows(2.0)
    assert 10 <= num_runs(budget, 2.0, 5000) <= 25


def test_what_drafts_saved_may_be_lost_again() -> None:
    budget = DraftBudget()
    budget.add(4.0)
    assert num_runs(budget, 2.0, 3) == 3


def test_savings_are_bounded() -> None:
    budget = DraftBudget()
    budget.add(1000.0)
    assert num_runs(budget, 2.0, 20) == 8


def test_more_is_lost_than_there_was_credit_for() -> None:
    budget = DraftBudget()
    budget.add(-10.0)
    assert num_runs(budget, 2.0, 1000) == 0
