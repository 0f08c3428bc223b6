"""Stopwatch: seconds by stage of a start-up."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Stopwatch:
    """Seconds of consecutive stages."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._lap_started = time.monotonic()

    def lap(self, stage: str) -> None:
        """End the stage that began with the previous call, and record its seconds."""
        now = time.monotonic()
        self._laps[stage] = now - self._lap_started
        self._lap_started = now

    @property
    def laps(self) -> Mapping[str, float]:
        """Seconds by stage."""
        return self._laps

    @property
    def total_s(self) -> float:
        return sum(self._laps.values())

    def __str__(self) -> str:
        return format_seconds(self._laps)


def format_seconds(seconds: Mapping[str, float]) -> str:
    """Return ``stage 1.23 s, stage 0.40 s``."""
    return ", ".join(f"{stage} {value:.2f} s" for stage, value in seconds.items())
