"""Examination: finds the ranks that have failed among those that are late with a step. Its clock is an argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ....proto.replica_status import COMPILE_STAGE

# For a late rank's process to report its stage. On a busy machine with two cores an answer takes up to 0.8 s.
ANSWER_TIMEOUT_S = 3.0
# Most time of a step in which a kernel is compiled. The other ranks' collectives fail after 60 s.
COMPILE_TIMEOUT_S = 60.0


class Questions(Protocol):
    """Questions to ranks for the stage that they are in."""

    def take_answers(self) -> dict[int, str]:
        """Return rank |-> stage of the answers that have come since the last call. Never waits."""
        ...


class Examination:
    """Asks the ranks that are late with one step for their stages, again when the step is overdue.

    A rank that does not answer has failed. Ranks that answer have failed when the step is overdue: any of them may be
    the one that keeps the others in a collective. While one compiles a kernel, the step has as long again.

    Args:
        ask: asks ranks, without waiting.
        failed_s: time after the begin of the step when it is overdue.
        clock: monotonic time, seconds.

    Attributes:
        stages: rank |-> the stage of its latest answer.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[int]], Questions],
        failed_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stages: dict[int, str] = {}
        self._ask, self._clock = ask, clock
        self._grace_s = self._deadline_s = failed_s
        self._questions: Questions | None = None
        self._awaited: set[int] = set()
        self._asked_at = self._asked_after_s = 0.0

    @property
    def is_answered(self) -> bool:
        """Return whether all ranks have answered the latest question."""
        return self._questions is not None and not self._awaited

    def find_failed(self, late: Sequence[int], waited_s: float) -> list[int]:
        """Return the ranks that have failed, the one to name first; empty while there is reason to wait.

        Args:
            late: ranks without a reply.
            waited_s: time since the begin of the step.
        """
        is_overdue = waited_s >= self._deadline_s
        if self._questions is None or (is_overdue and self._asked_after_s < self._deadline_s):
            self._ask_all(late, waited_s)
        self._take_answers()
        if self._awaited & set(late):
            is_silent = self._clock() - self._asked_at >= ANSWER_TIMEOUT_S
            silent = [rank for rank in late if rank in self._awaited]
            for rank in silent if is_silent else ():
                self.stages.pop(rank, None)
            return silent if is_silent else []
        if not is_overdue:
            return []
        if COMPILE_STAGE in [self.stages.get(rank) for rank in late] and waited_s < COMPILE_TIMEOUT_S:
            self._deadline_s = min(waited_s + self._grace_s, COMPILE_TIMEOUT_S)
            return []
        return list(late)

    def _ask_all(self, late: Sequence[int], waited_s: float) -> None:
        self._questions, self._awaited = self._ask(late), set(late)
        self._asked_at, self._asked_after_s = self._clock(), waited_s

    def _take_answers(self) -> None:
        assert self._questions is not None
        answers = self._questions.take_answers()
        self.stages |= answers
        self._awaited -= set(answers)
