"""Backoff: delays, and when the next attempt is due."""

from __future__ import annotations

from quire.cluster.os_utils.backoff import Backoff


def test_backoff_doubles_up_to_its_maximum() -> None:
    backoff = Backoff(first_s=1.0, max_s=120.0)
    assert backoff.is_due(0.0)
    assert [backoff.fail(10.0) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 64, 120, 120]
    assert backoff.num_failures == 9
    assert not backoff.is_due(129.9)
    assert backoff.is_due(130.0)


def test_backoff_begins_anew_after_reset() -> None:
    backoff = Backoff(first_s=1.0, max_s=120.0)
    backoff.fail(10.0)
    backoff.fail(10.0)
    backoff.reset()
    assert backoff.is_due(0.0)
    assert backoff.num_failures == 0
    assert backoff.fail(0.0) == 1


def test_backoff_stays_at_its_maximum_for_ever() -> None:
    backoff = Backoff(first_s=0.2, max_s=5.0)
    delays = [backoff.fail(0.0) for _ in range(3000)]  # 2.0 ** 1024 is no float
    assert delays[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert set(delays[5:]) == {5.0}
