"""A pipeline of stages in simulated time, driven by the real scheduler, which measures how long its stages wait."""

from __future__ import annotations

from collections import deque

import numpy as np
from driver import Driver

from quire.proto.step import StepPlan


class PipelineTimes:
    """Runs a Driver as a step loop does, on ranks of which each stage takes a part of each step's time.

    A stage computes a step after the step before, when the stage before has computed it. The first stage also waits
    for the tokens of its rows, which the last stage samples.

    Args:
        num_stages: default: as many as the scheduler plans for.
        step_s, token_s: time of a stage for a step, and for each token of it.
        transfer_s: from a stage to the next.
    """

    def __init__(
        self,
        driver: Driver,
        num_stages: int | None = None,
        step_s: float = 1.0,
        token_s: float = 0.01,
        transfer_s: float = 0.0,
    ) -> None:
        self._driver = driver
        self._num_stages = num_stages or driver.config.parallel.pipeline_parallel_size
        self._step_s, self._token_s, self._transfer_s = step_s, token_s, transfer_s
        self._free_at = [0.0] * self._num_stages
        self._busy_s = [0.0] * self._num_stages
        self._sampled_at: dict[int, float] = {}  # row |-> when its newest token reaches the first stage
        self._ends: deque[float] = deque()  # of the steps in flight
        self._counted_from = 0.0

    def run(self, num_steps: int) -> None:
        """Apply the results of so many steps, or fewer if there is no more work."""
        driver = self._driver
        for _ in range(num_steps):
            while driver.scheduler.num_in_flight < driver.config.scheduler.max_steps_in_flight:
                plan = driver.plan()
                if plan is None:
                    break
                self._compute(plan)
            if not self._ends:
                return
            driver.now = max(driver.now, self._ends.popleft())
            driver.apply_result()

    def count_from_now(self) -> None:
        """Forget what the stages did so far."""
        self._busy_s = [0.0] * self._num_stages
        self._counted_from = max(self._free_at)

    @property
    def bubble_share(self) -> float:
        """Return the share of the time in which a stage waits, mean over the stages."""
        span = max(self._free_at) - self._counted_from
        return 1.0 - float(np.mean(self._busy_s)) / span

    def _compute(self, plan: StepPlan) -> None:
        step = self._driver.scheduler._state.in_flight.find(plan.step_id)
        assert step is not None
        decoding = set(step.rows.tolist()) - set(step.first_rows)
        arrival = max([self._driver.now, *(self._sampled_at.get(row, 0.0) for row in decoding)])
        seconds = self._step_s + self._token_s * step.num_tokens
        for stage in range(self._num_stages):
            start = max(arrival, self._free_at[stage])
            self._free_at[stage] = start + seconds
            self._busy_s[stage] += seconds
            arrival = self._free_at[stage] + self._transfer_s
        for row in step.rows.tolist():
            self._sampled_at[row] = arrival
        self._ends.append(arrival)
