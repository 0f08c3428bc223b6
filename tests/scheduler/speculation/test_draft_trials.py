"""DraftTrials: steps draft while that shortens the measured time per token."""

from __future__ import annotations

import random

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


def simulate_noisily(seed: int, cost: float, num_steps: int) -> tuple[int, float]:
    """Return how often steps began to draft for longer than a trial, or ceased, and the share of steps that drafted.

    A step that drafts gives 2 or 3 tokens in `cost` times the time. One in twelve steps is delayed.
    """
    rng, trials = random.Random(seed), DraftTrials()
    num_switches, num_drafting, was_on = 0, 0, True
    for _ in range(num_steps):
        has_drafts = trials.allow(1)
        seconds = (cost if has_drafts else 1.0) * (1 + abs(rng.gauss(0, 0.4)))
        if rng.random() < 1 / 12:
            seconds *= rng.uniform(1.5, 6)
        trials.observe(1, has_drafts, rng.choice((2, 3)) if has_drafts else 1, seconds)
        is_on = trials._load(1).is_on
        num_switches += is_on != was_on
        num_drafting += has_drafts
        was_on = is_on
    return num_switches, num_drafting / num_steps


def test_noise_does_not_switch_drafts_that_pay() -> None:
    runs = [simulate_noisily(seed, 2.15, 1500) for seed in range(20)]
    assert sum(switches for switches, _ in runs) <= 4
    assert min(share for _, share in runs) > 0.7


def test_drafts_that_cost_much_are_rarely_tried() -> None:
    runs = [simulate_noisily(seed, 5.0, 3000) for seed in range(10)]
    assert max(share for _, share in runs) < 0.04
    assert all(switches == 1 for switches, _ in runs)


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
