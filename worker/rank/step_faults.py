"""StepFaults: the faults that an operator causes in the steps of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...proto.faults import Fault, FaultKind
from ...proto.step import StepPlan


class InjectedFault(RuntimeError):
    """The exception of a step that an operator asked for."""


class StepFaults:
    """Faults that wait for a step of this rank. `add` may be called from another thread than `before_step`.

    Args:
        clock: monotonic time in seconds.
        sleep: delays a step.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        # Each with the time of its end. Replaced as a whole: a step reads it without a lock.
        self._active: tuple[tuple[Fault, float], ...] = ()

    def add(self, fault: Fault) -> None:
        """Let a fault begin with the next step."""
        self._active = (*self._active, (fault, self._clock() + fault.duration_s))

    def before_step(self, plan: StepPlan) -> None:
        """Raise or wait as the faults demand; does nothing without faults.

        Raises:
            InjectedFault: by a fault of the kind EXCEPTION or POISON.
        """
        if self._active:
            self._apply(plan)

    def _apply(self, plan: StepPlan) -> None:
        now, faults = self._clock(), self._active
        self._active = tuple(
            (fault, end) for fault, end in faults if fault.kind is not FaultKind.EXCEPTION and now < end
        )
        for fault, _ in faults:
            if fault.kind is FaultKind.EXCEPTION:
                raise InjectedFault("an operator caused this exception")
        for fault, _ in self._active:
            if fault.kind is FaultKind.SLOW:
                self._sleep(fault.delay_s)
            elif any(fault.token_id in sequence.token_ids for sequence in plan.new):
                raise InjectedFault(f"an operator poisoned token {fault.token_id}")
