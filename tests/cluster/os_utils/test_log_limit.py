"""Records alike are limited per interval, and what is left out is counted."""

from __future__ import annotations

import logging

from quire.cluster.os_utils.logs import _MAX_KINDS, INTERVAL_S, MAX_REPEATS, RepeatLimit


class Limited:
    """A limit with a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit = RepeatLimit(lambda: self.now)

    def log(self, text: str, *arguments: object, level: int = logging.ERROR) -> str | None:
        """Return the logged text; None if the record was left out."""
        record = logging.LogRecord("quire", level, "file", 1, text, arguments, None)
        return record.getMessage() if self.limit.filter(record) else None


def test_records_alike_are_limited_whatever_their_arguments() -> None:
    limited = Limited()
    logged = [limited.log("call %d failed", number) for number in range(100)]
    assert logged == [f"call {number} failed" for number in range(MAX_REPEATS)] + [None] * (100 - MAX_REPEATS)
    assert limited.log("another failure") == "another failure"


def test_next_interval_says_how_many_were_left_out() -> None:
    limited = Limited()
    for number in range(100):
        limited.log("call %d failed", number)
    limited.now += INTERVAL_S
    assert limited.log("call %d failed", 7) == "call 7 failed (90 records like this were left out)"
    assert limited.log("call %d failed", 8) == "call 8 failed"
    limited.now += INTERVAL_S
    assert limited.log("call %d failed", 9) == "call 9 failed"


def test_information_is_not_limited() -> None:
    limited = Limited()
    assert all(limited.log("step", level=logging.INFO) for _ in range(100))


def test_kinds_are_bounded() -> None:
    limited = Limited()
    for number in range(3 * _MAX_KINDS):
        assert limited.log(f"failure {number}")
    assert len(limited.limit._windows) == _MAX_KINDS
