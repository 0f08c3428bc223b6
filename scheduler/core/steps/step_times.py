"""StepTimes: durations of past steps, which predict the duration of the next one. Pure: times are arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A shorter step moves the prediction by this share; a longer one replaces it.
_DECAY = 0.1
# A step is late after this multiple of its prediction, but no earlier than MIN_LATE_S: the process of a late rank is
# examined, which costs nothing if it is only slow.
_LATE_FACTOR = 4.0
MIN_LATE_S = 0.5
# A step has failed this multiple of its prediction after it was due: at least MIN_OVERDUE_S, at most `max_overdue_s`.
# Ranks of a busy machine have been without a processor for 2 to 3 s.
_OVERDUE_FACTOR = 8.0
MIN_OVERDUE_S = 5.0
# Before the first measurement: a first step may compile kernels and touch memory for the first time.
UNMEASURED_S = 60.0


@dataclass(frozen=True, slots=True)
class StepDeadlines:
    """Times after the begin of a step, in seconds.

    Attributes:
        expected_s: predicted duration; None before the first measurement.
        late_s: when its ranks are examined.
        failed_s: when a rank without an answer has failed.
    """

    expected_s: float | None
    late_s: float
    failed_s: float


class StepTimes:
    """Predicts a step's duration from the number of tokens that it computes.

    Steps are grouped by the power of two of their tokens. The prediction of a group follows longer steps at once and
    shorter ones slowly, so it is near the longest of the recent steps.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # bit length of the number of tokens |-> prediction
        self._ended_at = -math.inf

    def began_at(self, planned_at: float) -> float:
        """Return when the ranks began the oldest step in flight: once the step before it was done."""
        return max(planned_at, self._ended_at)

    def observe(self, num_tokens: int, planned_at: float, done_at: float, *, is_typical: bool = True) -> None:
        """Record a step that is done.

        Args:
            is_typical: it did nothing else that takes long; otherwise its duration predicts none.
        """
        seconds = max(0.0, done_at - self.began_at(planned_at))
        self._ended_at = done_at
        if not is_typical:
            return
        size = num_tokens.bit_length()
        old = self._seconds.get(size, 0.0)
        self._seconds[size] = max(seconds, old + _DECAY * (seconds - old))

    def predict(self, num_tokens: int) -> float | None:
        """Return the duration of a step; None before the first measurement.

        A size without measurements takes at most as long as a larger one, and is proportional to a smaller one.
        """
        size = num_tokens.bit_length()
        if larger := [other for other in self._seconds if other >= size]:
            return self._seconds[min(larger)]
        if not self._seconds:
            return None
        largest = max(self._seconds)
        return self._seconds[largest] * 2.0 ** (size - largest)

    def deadlines(self, num_tokens: int, max_overdue_s: float) -> StepDeadlines:
        """Return when a step of `num_tokens` is late and when it has failed.

        Args:
            max_overdue_s: longest time to wait beyond the prediction.
        """
        expected_s = self.predict(num_tokens)
        if expected_s is None:
            return StepDeadlines(None, min(MIN_LATE_S, max_overdue_s), max(UNMEASURED_S, max_overdue_s))
        overdue_s = min(max_overdue_s, max(MIN_OVERDUE_S, _OVERDUE_FACTOR * expected_s))
        late_s = max(MIN_LATE_S, _LATE_FACTOR * expected_s)
        failed_s = expected_s + overdue_s
        return StepDeadlines(expected_s, min(late_s, failed_s), failed_s)
