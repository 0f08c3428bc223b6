"""WorkerGroup: the step loop's interface to the ranks. Real ranks, a simulator and fakes implement it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...proto.replica_status import RankStatus
from ...proto.step import EncoderInput, StepPlan, StepResult
from ..kv.kv_tiers import KvTiers


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A worker group after a failure.

    Attributes:
        has_new_ranks: processes were replaced; they have loaded the weights that the replica started with.
        kept: memories whose content survived on all ranks.
    """

    has_new_ranks: bool
    kept: KvTiers


class WorkerGroup(Protocol):
    """Ranks that execute plans in order."""

    def broadcast(self, plan: StepPlan) -> None:
        """Send one plan to every rank. May return before a rank has begun."""
        ...

    def send_media(self, image: EncoderInput) -> None:
        """Send the tensors of an image to every rank, before the plan that has it encoded is broadcast."""
        ...

    def gather(self, timeout_s: float) -> StepResult | None:
        """Return rank 0's result of the oldest plan in flight; None if it has not come in time.

        Raises:
            RankFailed: a rank died or rejected the plan; names the rank.
        """
        ...

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        """Examine the ranks that have not replied to the oldest plan in flight, which is late. Never waits.

        Args:
            waited_s: time since the ranks began the step.
            failed_s: time after which a rank that has not replied has failed, even if its process lives, unless it
                compiles a kernel.

        Raises:
            RankFailed: a rank's process is stopped or does not answer, or the step is overdue; names the rank.
        """
        ...

    def check(self) -> None:
        """Raise RankFailed if a rank is known to be dead. Never waits."""
        ...

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the state of each rank. Waits for at most a moment."""
        ...

    def rebuild(self, epoch: int) -> Rebuilt:
        """Replace the ranks that failed and connect all of them anew, for plans of `epoch`. Their rows are empty.

        Another thread may call `statuses` and `close` meanwhile.

        Raises:
            QuireError: a rank cannot be replaced, or the ranks cannot be connected.
        """
        ...

    def close(self) -> None:
        """End the ranks, and a `rebuild` in another thread. Safe to call twice."""
        ...
