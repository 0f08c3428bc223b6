"""SchedulerStats: the control plane's own counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Primary counters since the start; what follows from them is a property.

    Attributes:
        num_steps: plans made.
        peak_held_blocks: most blocks held at once.
        waste_sum: over all steps, the share of the allocated KV slots that no token was planned into.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    peak_held_blocks: int = 0
    waste_sum: float = 0.0

    @property
    def mean_waste(self) -> float:
        return self.waste_sum / self.num_steps if self.num_steps else 0.0

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
