"""DraftSwitch: steps draft where that takes less time per token, and hardly ever elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.scheduler.speculation.draft_switch import DraftSwitch

MAX_LEN, NUM_TOKENS = 4, 200  # drafted tokens of a row, and tokens of a sequence


@dataclass
class Engine:
    """Sequences of one row after another. Steps without drafts take 1 s, except for noise.

    Attributes:
        cost: time of a step with drafts.
        noise: standard deviation of the logarithm of times.
    """

    switch: DraftSwitch = field(default_factory=lambda: DraftSwitch(MAX_LEN))
    cost: float = 2.5
    noise: float = 0.1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    step_id: int = 0

    def run(self, num_sequences: int, num_accepted: float) -> float:
        """Generate text of which steps accept so many tokens on average; return the tokens per second."""
        seconds = sum(self._run_sequence(num_accepted) for _ in range(num_sequences))
        return num_sequences * NUM_TOKENS / seconds

    def _run_sequence(self, num_accepted: float) -> float:
        num_tokens, seconds, first_step = 0, 0.0, self.step_id
        while num_tokens < NUM_TOKENS:
            self.switch.keeps_states(self.step_id, 1, starts_sequence=num_tokens == 0)
            chosen = None
            if self.switch.is_on(1):
                chosen = self.switch.choose(np.array([first_step]), np.array([MAX_LEN]), 100)
            num_gained = 1 if chosen is None else 1 + int(self.rng.binomial(MAX_LEN, num_accepted / MAX_LEN))
            spent = 1.0 if chosen is None else self.cost
            seconds += spent
            measured = spent * float(np.exp(self.rng.normal(0.0, self.noise)))
            self.switch.observe_step(1, num_gained, measured, has_drafts=chosen is not None)
            num_tokens += num_gained
            self.step_id += 1
        return seconds


def with_states() -> Engine:
    return Engine(DraftSwitch(MAX_LEN, needs_states=True))


def test_drafts_that_pay_go_on() -> None:
    engine = Engine()
    engine.run(1, 3.0)
    assert engine.run(50, 3.0) == pytest.approx((1 + 3.0) / 2.5, rel=0.03)


@pytest.mark.parametrize("num_accepted", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("needs_states", [False, True])
def test_drafts_that_do_not_pay_cost_four_percent_at_most(needs_states: bool, num_accepted: float) -> None:
    engine = with_states() if needs_states else Engine()
    engine.run(1, num_accepted)
    assert engine.run(4, num_accepted) > 0.96
    assert engine.run(50, num_accepted) > 0.98


def test_drafts_follow_the_text() -> None:
    engine = Engine()
    for _ in range(2):
        assert engine.run(50, 0.0) > 0.97
        assert engine.run(50, 3.0) > 1.4


def test_single_delayed_steps_do_not_end_drafts() -> None:
    engine = Engine()
    engine.run(5, 3.0)
    assert engine.switch.is_on(1)
    engine.switch.observe_step(1, 1, 100.0, has_drafts=True)
    assert engine.switch.is_on(1)


def test_steps_that_find_nothing_to_draft_look_seldom() -> None:
    switch, num_looks = DraftSwitch(MAX_LEN), 0
    for _ in range(1000):
        num_looks += switch.is_on(1)
        switch.observe_step(1, 1, 1.0, has_drafts=False)
    assert 200 < num_looks < 300
    while not switch.is_on(1):
        switch.observe_step(1, 1, 1.0, has_drafts=False)
    switch.observe_step(1, 3, 1.0, has_drafts=True)
    for _ in range(20):
        assert switch.is_on(1)
        switch.observe_step(1, 1, 1.0, has_drafts=False)


def test_loads_are_measured_apart() -> None:
    engine = Engine()
    engine.run(5, 3.0)
    assert engine.switch.is_on(1)
    assert not engine.switch.is_on(2)


def test_steps_of_too_many_rows_never_draft() -> None:
    switch = DraftSwitch(MAX_LEN, most_rows=2)
    for num_rows in (2, 3):
        for _ in range(100):
            switch.observe_step(num_rows, num_rows, 1.0, has_drafts=False)
    assert switch.is_on(2)
    assert not switch.is_on(3)


@pytest.mark.parametrize(
    ("limits", "most", "expected"),
    [
        ([-1, 2, 9], 100, [0, 2, MAX_LEN]),
        ([9, 9, 9], 7, [2, 2, 2]),
        ([0, 9, 0], 3, [0, 3, 0]),
        ([9, 9, 9], 2, None),
        ([0, 0, 0], 100, None),
    ],
)
def test_rows_draft_within_their_room_and_share_the_tokens_of_a_step(
    limits: list[int], most: int, expected: list[int] | None
) -> None:
    chosen = DraftSwitch(MAX_LEN).choose(np.ones(3, np.int64), np.array(limits, np.int32), most)
    assert (None if chosen is None else chosen.tolist()) == expected


def test_states_are_kept_while_drafts_may_begin() -> None:
    engine = with_states()
    assert engine.switch.keeps_states(0, 1, starts_sequence=True)
    engine.run(1, 0.0)
    assert not engine.switch.keeps_states(engine.step_id, 1, starts_sequence=True)
    for _ in range(2000):
        engine.switch.observe_step(1, 1, 1.0, has_drafts=False)
    assert not engine.switch.is_on(1)
    assert not engine.switch.keeps_states(1000, 1, starts_sequence=False)  # it lacks its earlier ones
    assert engine.switch.keeps_states(1001, 1, starts_sequence=True)
    assert engine.switch.is_on(1)
    chosen = engine.switch.choose(np.array([1000, 1001]), np.array([9, 9]), 100)
    assert chosen is not None
    assert chosen.tolist() == [0, MAX_LEN]


def test_states_are_not_kept_for_more_rows_than_draft() -> None:
    switch = DraftSwitch(MAX_LEN, most_rows=2, needs_states=True)
    assert switch.keeps_states(1, 2, starts_sequence=True)
    assert not switch.keeps_states(2, 3, starts_sequence=True)
    assert not switch.keeps_states(3, 2, starts_sequence=False)  # the rows lack their earlier ones
    assert switch.keeps_states(4, 2, starts_sequence=True)
