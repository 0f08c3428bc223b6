"""DraftBudget: what drafts lose is a small part of the time of steps without them."""

from __future__ import annotations

import pytest

from quire.scheduler.speculation.draft_budget import DraftBudget


def run(budget: DraftBudget, num_saved: float, num_steps: int) -> float:
    """Draft in all steps that may; return what was saved, in steps without drafts."""
    total = 0.0
    for _ in range(num_steps):
        if budget.is_spent:
            budget.add_plain_step()
        else:
            budget.add_drafted_step(num_saved)
            total += num_saved
    return total


@pytest.mark.parametrize("num_saved", [-0.05, -0.5, -2.0])
def test_steps_lose_a_hundredth_to_drafts_that_cost(num_saved: float) -> None:
    budget = DraftBudget()
    run(budget, num_saved, 1000)
    assert -50 < run(budget, num_saved, 5000) < -20


def test_drafts_that_pay_go_on() -> None:
    budget = DraftBudget()
    assert run(budget, 0.5, 1000) == pytest.approx(500)
    budget.add_drafted_step(-10.0)
    assert not budget.is_spent


def test_drafts_that_cease_to_pay_end_soon() -> None:
    budget = DraftBudget()
    run(budget, 0.5, 1000)
    assert run(budget, -0.5, 200) > -30


def test_drafts_that_paid_are_tried_again_soon() -> None:
    budget = DraftBudget()
    run(budget, 0.5, 1000)
    run(budget, -0.5, 32)
    assert budget.is_spent
    assert run(budget, 0.5, 300) > 50


def test_first_step_of_a_run_does_not_end_it() -> None:
    budget = DraftBudget()
    budget.add_catch_up(20.0)
    budget.add_drafted_step(0.5)
    assert not budget.is_spent
    for _ in range(40):
        budget.add_drafted_step(0.5)  # pays for it
    budget.end_run()
    assert budget.allows_probe


def test_first_step_counts_at_the_end_of_a_run_that_did_not_pay_for_it() -> None:
    budget = DraftBudget()
    budget.add_catch_up(20.0)
    budget.add_drafted_step(0.5)
    budget.end_run()
    assert not budget.allows_probe
