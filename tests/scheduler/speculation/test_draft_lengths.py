"""DraftLengths: drafts where they pay, and none where they cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.proto.block_tables import IntArray
from quire.scheduler.speculation.draft_lengths import DraftLengths
from quire.scheduler.speculation.step_times import StepTimes

NUM_DRAFTED = 4
NUM_TOKENS = np.full(64, 10, np.int32)  # of each row
StepTime = Callable[[int], float]


def memory_bound(num_tokens: int) -> float:
    return 5e-3 + 1e-5 * num_tokens


def compute_bound(num_tokens: int) -> float:
    return 1e-3 * num_tokens


def measured(num_rows: int) -> DraftLengths:
    """Return lengths that have measured steps of a second, with and without drafts."""
    lengths, rows = DraftLengths(8, NUM_DRAFTED), np.arange(num_rows)
    first_steps, limits = np.ones(num_rows, np.int64), np.full(num_rows, 9, np.int32)
    for _ in range(60):
        chosen = lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 100)
        if chosen is None:
            lengths.observe_plain(num_rows, 1.0)
        else:
            num_drafted = int(chosen.sum())
            lengths.observe_drafted(num_rows, num_rows + num_drafted, 1.0, 0.01, num_drafted, 1)
    return lengths


def simulate(
    num_rows: int,
    acceptance: float,
    step_s: StepTime,
    num_steps: int = 4000,
    draft_s: float = 0.0,
    stall_s: float = 0.0,
) -> float:
    """Return the tokens per second relative to those without drafts.

    Args:
        stall_s: time by which the first drafts appear to take longer; it does not count in the result.
    """
    lengths, rows = DraftLengths(num_rows, NUM_DRAFTED), np.arange(num_rows)
    limits, first_steps = np.full(num_rows, 100, np.int32), np.ones(num_rows, np.int64)
    rng, num_tokens, seconds, num_stalls = np.random.default_rng(0), 0, 0.0, 3
    for step_id in range(num_steps):
        chosen = None
        if lengths.is_due(num_rows, 1):
            chosen = lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 1000)
        drafted: IntArray = np.zeros(num_rows, np.int32) if chosen is None else chosen
        hits = rng.random((num_rows, NUM_DRAFTED)) < acceptance
        accepted = np.minimum(np.cumprod(hits, axis=1).sum(axis=1), drafted).astype(np.int32)
        rounds = int(drafted.max())
        spent = step_s(num_rows + int(drafted.sum())) + draft_s * rounds
        noisy = spent * rng.uniform(0.9, 1.3)
        num_gained = num_rows + int(accepted.sum())
        own_draft_s = draft_s * rounds
        if rounds and num_stalls:
            num_stalls -= 1
            noisy, own_draft_s = noisy + stall_s, own_draft_s + stall_s
        if chosen is None:
            if lengths.is_measured(step_id):
                lengths.observe_plain(num_rows, noisy)
        else:
            num_drafted = int(drafted.sum())
            lengths.observe_drafted(num_rows, num_gained, noisy, own_draft_s, num_drafted, rounds)
        has_some = drafted > 0
        lengths.observe(rows[has_some], drafted[has_some], accepted[has_some])
        num_tokens += num_rows + int(accepted.sum())
        seconds += spent
    return num_tokens / seconds / (num_rows / step_s(num_rows))


@pytest.mark.parametrize("num_rows", [1, 16])
def test_drafts_pay_in_steps_bound_by_memory(num_rows: int) -> None:
    assert simulate(num_rows, 0.8, memory_bound) > 2.5


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
def test_drafts_never_cost_two_percent_in_steps_bound_by_compute(num_rows: int, acceptance: float) -> None:
    assert simulate(num_rows, acceptance, compute_bound) > 0.98


@pytest.mark.parametrize("num_rows", [1, 16])
def test_rejected_drafts_never_cost_two_percent(num_rows: int) -> None:
    assert simulate(num_rows, 0.0, memory_bound) > 0.98


def test_expensive_drafts_are_left_out() -> None:
    assert simulate(1, 0.5, memory_bound, draft_s=4e-3) > 0.98


def test_stalled_drafts_do_not_end_drafts_for_good() -> None:
    assert simulate(1, 0.8, memory_bound, num_steps=6000, draft_s=2e-4, stall_s=0.2) > 1.8


def test_no_row_drafts_beyond_its_limit_or_the_budget() -> None:
    rows, first_steps, limits = np.arange(3), np.ones(3, np.int64), np.array([0, 2, 9], np.int32)
    # No step was measured.
    assert DraftLengths(8, NUM_DRAFTED).choose(rows, first_steps, NUM_TOKENS[:3], limits, 100) is None
    lengths = measured(3)
    chosen = lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 100)
    assert chosen is not None
    assert chosen.tolist() == [0, 2, 4]
    few = lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 3)
    assert few is not None
    assert few.sum() == 3
    assert lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 0) is None


def test_rows_without_room_for_drafts_have_none() -> None:
    lengths = measured(2)
    assert (
        lengths.choose(np.arange(2), np.ones(2, np.int64), NUM_TOKENS[:2], np.zeros(2, np.int32), 100) is None
    )


def test_row_with_another_sequence_starts_anew() -> None:
    lengths, row = measured(1), np.array([1])
    first = lengths.acceptance(row).item()
    lengths.choose(row, np.array([1]), NUM_TOKENS[:1], np.array([9], np.int32), 100)
    for _ in range(20):
        lengths.observe(row, np.array([4], np.int32), np.array([0], np.int32))
    assert lengths.acceptance(row).item() < 0.1
    lengths.choose(row, np.array([2]), NUM_TOKENS[:1], np.array([9], np.int32), 100)
    assert 0.1 < lengths.acceptance(row).item() < first  # that of all sequences so far


@pytest.mark.parametrize("step_s", [memory_bound, compute_bound])
def test_step_times_find_the_slope_in_noise(step_s: StepTime) -> None:
    times, rng = StepTimes(), np.random.default_rng(0)
    assert not times.is_known
    for _ in range(300):
        num_tokens = int(rng.integers(16, 48))
        times.observe(num_tokens, step_s(num_tokens) * rng.uniform(0.8, 1.2))
    assert times.slope == pytest.approx(step_s(2) - step_s(1), rel=0.2, abs=2e-5)
    assert float(times.seconds(20)) == pytest.approx(step_s(20), rel=0.1)


def test_step_times_forget_what_more_tokens_cost() -> None:
    times = StepTimes()
    times.observe(1, 1.0)
    times.observe(9, 9.0)
    assert times.slope == pytest.approx(1.0, rel=0.2)
    for _ in range(1500):
        times.observe(1, 1.0)
    assert times.slope < 0.1


def test_work_around_drafts_does_not_shorten_them() -> None:
    """A step with one drafted token takes as long as one with four: most of its time is the work around drafts."""
    lengths, row = DraftLengths(1, NUM_DRAFTED), np.array([0])
    first_steps, limits = np.ones(1, np.int64), np.array([100], np.int32)
    rng, chosen_lens = np.random.default_rng(0), []
    for _ in range(400):
        chosen = (
            lengths.choose(row, first_steps, NUM_TOKENS[:1], limits, 100) if lengths.is_due(1, 1) else None
        )
        num_drafted = 0 if chosen is None else int(chosen.sum())
        seconds = rng.uniform(0.9, 1.1) * (1.6e-3 + 3e-5 * num_drafted if num_drafted else 1e-3)
        num_accepted = min(num_drafted, int(rng.geometric(0.25)) - 1)
        if not num_drafted:
            lengths.observe_plain(1, seconds)
        else:
            lengths.observe_drafted(1, 1 + num_accepted, seconds, 1e-4, num_drafted, num_drafted)
            lengths.observe(row, np.array([num_drafted], np.int32), np.array([num_accepted], np.int32))
            chosen_lens.append(num_drafted)
    assert len(chosen_lens) > 250
    assert np.mean(chosen_lens) > 3


def test_choice_holds_while_rows_and_limits_stay() -> None:
    lengths, rows = measured(3), np.arange(3)
    first_steps, limits = np.ones(3, np.int64), np.full(3, 9, np.int32)
    for _ in range(4):
        chosen = lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 100)
        assert chosen is not None
        lengths.observe_drafted(3, 12, 1.0, 0.01, 12, 4)
    held = lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 100)
    assert lengths.choose(rows, first_steps, NUM_TOKENS[: rows.size], limits, 100) is held
    fewer = lengths.choose(rows, first_steps, NUM_TOKENS[:3], np.array([9, 1, 9], np.int32), 100)
    assert fewer is not None
    assert fewer.tolist() == [4, 1, 4]
    other = lengths.choose(rows[:2], first_steps[:2], NUM_TOKENS[:2], limits[:2], 100)
    assert other is not None
    assert other.tolist() == [4, 4]


def test_steps_of_too_many_rows_have_no_drafts() -> None:
    lengths = DraftLengths(8, NUM_DRAFTED, most_rows=2)
    assert [lengths.is_due(num_rows, 1) for num_rows in (1, 2, 3, 8)] == [True, True, False, False]


def test_states_are_kept_again_for_a_new_sequence_once_there_is_credit() -> None:
    lengths, rows = DraftLengths(2, NUM_DRAFTED, needs_states=True), np.array([0, 1])
    limits = np.full(2, 9, np.int32)
    for _ in range(400):  # the text of the first sequence does not pay
        assert lengths.keeps_states(1, 1, [])
        chosen = (
            lengths.choose(rows[:1], np.array([1]), NUM_TOKENS[:1], limits[:1], 100)
            if lengths.is_due(1, 1)
            else None
        )
        drafted = 0 if chosen is None else int(chosen.sum())
        if chosen is None:
            lengths.observe_plain(1, 1.0)
        else:
            lengths.observe_drafted(1, 1, 1.0 + drafted, 0.1, drafted, drafted)
        if not lengths._load(1).may_run_soon:
            break
    assert not lengths.keeps_states(2, 1, [])
    while not lengths._load(1).may_compute(10):
        assert not lengths.keeps_states(3, 1, [])
        assert not lengths.is_due(1, 1)
        lengths.observe_plain(1, 1.0)
    assert not lengths.keeps_states(4, 1, [])  # the sequence lacks its earlier ones
    assert lengths.keeps_states(5, 2, [10])
    assert any(lengths.is_due(2, 2) for _ in range(8))
    for _ in range(60):
        chosen = lengths.choose(rows, np.array([1, 5]), NUM_TOKENS[:2], limits, 100)
        lengths.observe_plain(2, 1.0)
        if chosen is not None:
            break
    assert chosen is not None
    assert chosen[0] == 0 < chosen[1]


def test_states_are_not_kept_for_more_rows_than_draft() -> None:
    lengths = DraftLengths(8, NUM_DRAFTED, most_rows=2, needs_states=True)
    assert lengths.keeps_states(1, 2, [10, 10])
    assert not lengths.keeps_states(2, 3, [10])
    assert not lengths.keeps_states(3, 2, [])  # the rows lack their earlier ones
    assert lengths.keeps_states(4, 2, [10])
