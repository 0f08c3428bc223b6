"""Fault: a failure that an operator causes in a process of a replica, to exercise its recovery."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from .errors import InvalidRequest

MAX_FAULT_S = 3600.0


class FaultKind(StrEnum):
    """Kind of a fault.

    KILL: SIGKILL. STOP: SIGSTOP, for good. EXCEPTION: the next step raises an exception. SLOW: steps are delayed for
    a while. POISON: for a while, every step that begins a sequence with a certain token raises an exception.
    """

    KILL = "kill"
    STOP = "stop"
    EXCEPTION = "exception"
    SLOW = "slow"
    POISON = "poison"


# Kinds that any process can have |-> the signal; the others are faults of a step, which ranks execute.
SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one process.

    Attributes:
        delay_s: with SLOW, the delay of each step.
        duration_s: with SLOW and POISON, how long the fault lasts.
        token_id: with POISON, the token whose sequences fail.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    kind: FaultKind
    delay_s: float = 0.0
    duration_s: float = 0.0
    token_id: int = 0

    def __post_init__(self) -> None:
        lasts = self.kind in (FaultKind.SLOW, FaultKind.POISON)
        if lasts and not 0 < self.duration_s <= MAX_FAULT_S:
            _refuse("duration_s", self.duration_s)
        if self.kind is FaultKind.SLOW and not 0 < self.delay_s <= MAX_FAULT_S:
            _refuse("delay_s", self.delay_s)


def _refuse(name: str, value: float) -> None:
    raise InvalidRequest(name, f"is {value:g}, must be more than 0 and at most {MAX_FAULT_S:g}")
