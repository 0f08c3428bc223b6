"""The control plane's own counters, and how fast it gets on."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A step counts half after this much computing.
_HALF_LIFE_S = 5.0


@dataclass(slots=True)
class SchedulerStats:
    """Primary counters since the start; what follows from them is a property.

    Attributes:
        num_steps: plans made.
        peak_held_blocks: most blocks held at once.
        waste_sum: over all steps, the share of the allocated KV slots that no token was planned into.
        num_gaps: steps that followed another without an idle time between.
        gap_sum_s: seconds that rank 0 waited for the plans of those.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    peak_held_blocks: int = 0
    waste_sum: float = 0.0
    num_gaps: int = 0
    gap_sum_s: float = 0.0

    @property
    def mean_kv_fragmentation(self) -> float:
        return self.waste_sum / self.num_steps if self.num_steps else 0.0

    @property
    def mean_plan_wait_s(self) -> float:
        """How long the ranks wait for the scheduler between two steps."""
        return self.gap_sum_s / self.num_gaps if self.num_gaps else 0.0

    def count_gap(self, waited_s: float) -> None:
        self.num_gaps += 1
        self.gap_sum_s += waited_s

    def count_step(self, num_held_blocks: int, num_slots: int, num_tokens: int) -> None:
        """One plan was made.

        Args:
            num_slots: KV slots that running sequences' tables hold, a shared block once a table.
            num_tokens: tokens planned into them.
        """
        self.num_steps += 1
        self.peak_held_blocks = max(self.peak_held_blocks, num_held_blocks)
        if num_slots:
            self.waste_sum += 1.0 - num_tokens / num_slots


@dataclass(slots=True)
class Throughput:
    """Tokens a second in which there was something to compute, recent steps before older ones.

    Idle time says nothing of what a replica could do, so it is left out: a replica that has nothing to do keeps its
    last rate.
    """

    _num_tokens: float = 0.0
    _seconds: float = 0.0
    _counted_until: float = -math.inf

    @property
    def tokens_per_s(self) -> float:
        """0 while nothing is known."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def count_step(self, num_tokens: int, planned_at: float, done_at: float) -> None:
        """A step was computed. Steps overlap: only its time after the end of the one before counts."""
        seconds = max(0.0, done_at - max(planned_at, self._counted_until))
        faded = 0.5 ** (seconds / _HALF_LIFE_S)
        self._num_tokens = faded * self._num_tokens + num_tokens
        self._seconds = faded * self._seconds + seconds
        self._counted_until = done_at
