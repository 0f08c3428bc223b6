"""StepStages: the stage that a rank is in, and the time that each stage of a step took."""

from __future__ import annotations

import time

IDLE = "idle"


class StepStages:
    """The present stage of a rank's steps.

    Attributes:
        stage: ``idle`` between steps. Other threads may read it. After a failure it keeps the stage that failed.
        times: seconds of the stages of the present step, in the result's own dictionary; on a GPU the time to launch
            them, except where the host waits.
    """

    def __init__(self) -> None:
        self.stage = IDLE
        self.times: dict[str, float] = {}
        self._began_at = 0.0

    def begin_step(self) -> dict[str, float]:
        """Return the dictionary that gets the times of the next step's stages."""
        self.times = {}
        return self.times

    def begin(self, stage: str) -> None:
        """End the present stage, and begin another one; ``idle`` counts no time."""
        now = time.perf_counter()
        if self.stage != IDLE:
            self.times[self.stage] = self.times.get(self.stage, 0.0) + now - self._began_at
        self.stage, self._began_at = stage, now

    def reset(self) -> None:
        """Be idle, after a failure too."""
        self.stage = IDLE
