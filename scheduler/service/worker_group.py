"""WorkerGroup: the step loop's interface to the ranks. Real ranks, a simulator and fakes implement it."""

from __future__ import annotations

from typing import Protocol

from ...proto.step import StepPlan, StepResult
from ...proto.stream import RankStatus


class WorkerGroup(Protocol):
    """Ranks that execute plans in order."""

    def broadcast(self, plan: StepPlan) -> None:
        """Send one plan to every rank. May return before a rank has begun."""
        ...

    def gather(self, timeout_s: float) -> StepResult:
        """Return rank 0's result of the oldest plan in flight.

        Raises:
            RankFailed: a rank died, rejected the plan, or did not reply in time; names the rank.
        """
        ...

    def check(self) -> None:
        """Raise RankFailed if a rank is known to be dead. Never waits."""
        ...

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the state of each rank. Waits for at most a moment."""
        ...

    def close(self) -> None:
        """End the ranks. Safe to call twice."""
        ...
