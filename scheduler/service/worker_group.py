"""WorkerGroup: the scheduler's whole view of the ranks. Fakes, a simulator and real ranks all stand behind it."""

from __future__ import annotations

from typing import Protocol

from ...proto.step import StepPlan, StepResult
from ...proto.stream import RankStatus


class WorkerGroup(Protocol):
    """Ranks that execute plans in order."""

    def broadcast(self, plan: StepPlan) -> None:
        """Hands one plan to every rank. May return before any has begun."""
        ...

    def gather(self, timeout_s: float) -> StepResult:
        """Rank 0's result of the earliest plan not gathered yet.

        Raises:
            RankFailed: a rank died, refused the plan, or did not answer in time; names it.
        """
        ...

    def check(self) -> None:
        """Raises RankFailed if a rank is known to be dead. Never waits."""
        ...

    def statuses(self) -> tuple[RankStatus, ...]:
        """Who the ranks are and what they are doing. Waits for at most a moment."""
        ...

    def close(self) -> None:
        """Ends the ranks. Safe to call twice."""
        ...
