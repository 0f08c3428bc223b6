"""Start of spare processes: after the first step, in an idle moment or after a while, and once."""

from __future__ import annotations

from quire.cluster.fleet.replica.channel_group import BUSY_S, IDLE_S, SparesClock


def test_spares_wait_for_the_first_step() -> None:
    clock = SparesClock()
    assert not clock.note_idle(10 * BUSY_S)


def test_spares_start_once_in_an_idle_moment() -> None:
    clock = SparesClock()
    assert not clock.note_step(100.0)
    assert not clock.note_step(101.0)
    assert not clock.note_idle(100.9 + IDLE_S)
    assert clock.note_idle(101.0 + IDLE_S)
    assert not clock.note_idle(102.0 + IDLE_S)
    assert not clock.note_step(101.0 + BUSY_S)


def test_spares_of_a_group_that_is_never_idle_start_after_a_while() -> None:
    clock = SparesClock()
    assert not clock.note_step(100.0)
    assert not clock.note_step(99.0 + BUSY_S)
    assert clock.note_step(100.0 + BUSY_S)
    assert not clock.note_step(200.0 + BUSY_S)
