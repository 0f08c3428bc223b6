"""JumpForward: room for forced tokens where rows use it, and where it pays."""

from __future__ import annotations

import numpy as np
import pytest

from quire.proto.block_tables import IntArray
from quire.proto.config import MAX_JUMP_FORWARD_TOKENS
from quire.scheduler.speculation.jump_forward import JumpForward

ROWS = np.arange(4)
LIMITS = np.full(4, 100, np.int32)
MANY = 1000


def with_grammars(*rows: int) -> JumpForward:
    forced = JumpForward(4)
    for row in rows:
        forced.add(row)
    return forced


def rooms(forced: JumpForward, steps: range, limits: IntArray = LIMITS, most: int = MANY) -> list[IntArray]:
    chosen = (forced.choose(ROWS, limits, most, step) for step in steps)
    return [np.zeros(4, np.int32) if each is None else each for each in chosen]


def test_rows_with_grammars_have_room() -> None:
    forced = with_grammars(1, 3)
    limits = np.array([100, 100, 100, 2], np.int32)
    (room,) = rooms(forced, range(1, 2), limits)
    assert room.tolist() == [0, MAX_JUMP_FORWARD_TOKENS, 0, 2]
    forced.discard(1)
    (room,) = rooms(forced, range(2, 3))
    assert room.tolist() == [0, 0, 0, MAX_JUMP_FORWARD_TOKENS]
    assert forced.num_rows == 1


@pytest.mark.parametrize(("most", "each"), [(0, 0), (2, 0), (3, 1), (10, 3)])
def test_rows_share_the_tokens_of_a_step(most: int, each: int) -> None:
    (room,) = rooms(with_grammars(0, 1, 2), range(1, 2), most=most)
    assert room.tolist() == [each, each, each, 0]


def test_row_without_jump_forward_is_asked_rarely_until_it_has_some() -> None:
    forced = with_grammars(0)
    for room in rooms(forced, range(1, 100)):
        if room.any():
            forced.observe(np.array([0]), np.array([0], np.int32))
    num_asked = sum(bool(room.any()) for room in rooms(forced, range(100, 180)))
    assert 0 < num_asked <= 10
    forced.observe(np.array([0]), np.array([3], np.int32))
    num_asked = sum(bool(room.any()) for room in rooms(forced, range(180, 188)))
    assert num_asked >= 5


def simulate(
    room_s: float, num_jump_forward: int, forced: JumpForward | None = None, num_rows: int = 4
) -> float:
    """Return the tokens per second relative to those of steps without room, which take 1 s.

    Args:
        room_s: further time of a step with room.
        num_jump_forward: forced tokens of each row in a step with room.
    """
    forced = forced or with_grammars(0, 1, 2, 3)
    rows, num_tokens, seconds = ROWS[:num_rows], 0, 0.0
    for step in range(2000):
        chosen = forced.choose(rows, LIMITS[:num_rows], MANY, step)
        gained, spent = (
            (num_rows, 1.0) if chosen is None else (num_rows * (1 + num_jump_forward), 1.0 + room_s)
        )
        forced.observe_step(num_rows, gained, spent, has_drafts=chosen is not None)
        if chosen is not None:
            forced.observe(rows, np.full(num_rows, num_jump_forward, np.int32))
        num_tokens += gained
        seconds += spent
    return num_tokens / num_rows / seconds


def test_room_stays_where_it_pays() -> None:
    gain = (1 + 2) / 1.5
    assert simulate(0.5, 2) > 0.95 * gain


def test_room_that_does_not_pay_is_given_up() -> None:
    assert simulate(2.0, 1) > 0.97


def test_load_at_which_room_pays_does_not_open_another() -> None:
    forced = with_grammars(0, 1, 2, 3)
    assert simulate(0.5, 8, forced, num_rows=1) > 5
    assert simulate(2.5, 1, forced, num_rows=4) > 0.95
    assert simulate(0.5, 8, forced, num_rows=1) > 5
