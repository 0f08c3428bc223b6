"""ends_within returns in time and passes errors on."""

from __future__ import annotations

import threading

import pytest

from quire.worker.comm.deadline import ends_within


def test_ends_within_returns_whether_the_call_ended() -> None:
    released = threading.Event()
    assert ends_within(60, lambda: None)
    assert not ends_within(0.01, released.wait)
    released.set()


def test_ends_within_raises_error_of_the_call() -> None:
    def fail() -> None:
        raise ValueError("on command")

    with pytest.raises(ValueError, match="on command"):
        ends_within(60, fail)
