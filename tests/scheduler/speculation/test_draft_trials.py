"""DraftTrials: steps draft while that shortens the measured time per token."""

from __future__ import annotations

import pytest

from quire.scheduler.speculation.draft_trials import DraftTrials


def simulate(
    trials: DraftTrials, num_rows: int, cost: float, gain: float, num_steps: int
) -> tuple[float, float]:
    """Return the share of steps that drafted, and the time per token relative to steps without drafts.

    Args:
        cost: time of a step that drafts, relative to one without.
        gain: tokens of a step that drafts, relative to one without.
    """
    num_drafting, tokens, seconds = 0, 0.0, 0.0
    for _ in range(num_steps):
        has_drafts = trials.allow(num_rows)
        num_tokens, spent = (round(gain * num_rows), cost) if has_drafts else (num_rows, 1.0)
        trials.observe(num_rows, has_drafts, num_tokens, spent)
        num_drafting += has_drafts
        tokens, seconds = tokens + num_tokens, seconds + spent
    return num_drafting / num_steps, seconds / tokens * num_rows


@pytest.mark.parametrize("num_rows", [1, 16])
def test_steps_draft_if_that_pays(num_rows: int) -> None:
    share, time = simulate(DraftTrials(), num_rows, 1.3, 2.0, 2000)
    assert share > 0.9
    assert time < 0.7


@pytest.mark.parametrize("cost", [1.15, 1.5])
def test_steps_do_not_draft_if_that_costs(cost: float) -> None:
    trials = DraftTrials()
    simulate(trials, 16, cost, 1.0, 100)
    share, time = simulate(trials, 16, cost, 1.0, 2000)
    assert share < 0.08
    assert time < 1.04


def test_change_of_text_is_noticed() -> None:
    trials = DraftTrials()
    assert simulate(trials, 1, 1.2, 1.0, 1000)[0] < 0.2
    assert simulate(trials, 1, 1.2, 3.0, 1000)[0] > 0.5
    simulate(trials, 1, 1.2, 1.0, 700)
    assert simulate(trials, 1, 1.2, 1.0, 1000)[0] < 0.2


def test_loads_are_measured_apart() -> None:
    trials = DraftTrials()
    simulate(trials, 16, 1.5, 1.0, 300)
    assert simulate(trials, 1, 1.3, 2.0, 500)[0] > 0.8
    assert simulate(trials, 16, 1.5, 1.0, 500)[0] < 0.1


def test_one_delayed_step_changes_little() -> None:
    trials = DraftTrials()
    simulate(trials, 4, 1.3, 2.0, 300)
    trials.observe(4, True, 8, 1000.0)
    assert simulate(trials, 4, 1.3, 2.0, 300)[0] > 0.8
