"""Stopwatch: where the time of a start-up went."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Stopwatch:
    """Seconds by stage, one after the other."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._lap_started = time.monotonic()

    def lap(self, stage: str) -> None:
        """Ends the stage that has run since the last call."""
        now = time.monotonic()
        self._laps[stage] = now - self._lap_started
        self._lap_started = now

    @property
    def total_s(self) -> float:
        return sum(self._laps.values())

    def __str__(self) -> str:
        return seconds_in_words(self._laps)


def seconds_in_words(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {value:.2f} s" for stage, value in seconds.items())
