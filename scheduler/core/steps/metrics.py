"""Counters of the control plane, and its throughput."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ....proto.block_tables import IntArray

# The weight of a step halves after this much computing time.
_HALF_LIFE_S = 5.0


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, changed by the `count_*` methods; derived figures are properties.

    Attributes:
        num_steps: plans made.
        peak_used_blocks: most blocks held at once.
        unused_share_sum: sum over all steps of the share of the allocated KV slots without a planned token.
        num_plan_waits: steps that followed another step without idle time between.
        plan_wait_s: seconds that rank 0 waited for the plans of these steps.
        num_compilations: kernel variants that rank 0 has compiled since it was ready.
        num_drafts: drafts that were verified, each of one row in one step.
        num_draft_tokens: their tokens.
        num_accepted: drafts of which the first, the second, ... token was accepted.
        num_retained_tokens: computed tokens whose KV survived failures of the ranks: of sequences that waited in host
            memory, and those that interrupted sequences found again.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    peak_used_blocks: int = 0
    unused_share_sum: float = 0.0
    num_plan_waits: int = 0
    plan_wait_s: float = 0.0
    num_compilations: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: list[int] = field(default_factory=list)
    num_retained_tokens: int = 0

    @property
    def mean_kv_fragmentation(self) -> float:
        return self.unused_share_sum / self.num_steps if self.num_steps else 0.0

    @property
    def mean_plan_wait_s(self) -> float:
        """Return the mean time that the ranks wait for the scheduler between two steps."""
        return self.plan_wait_s / self.num_plan_waits if self.num_plan_waits else 0.0

    def count_finished(self, num_sequences: int) -> None:
        self.num_finished += num_sequences

    def count_preemption(self) -> None:
        self.num_preemptions += 1

    def count_kept_tokens(self, num_tokens: int) -> None:
        self.num_retained_tokens += num_tokens

    def count_gap(self, waited_s: float) -> None:
        self.num_plan_waits += 1
        self.plan_wait_s += waited_s

    def count_drafts(self, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """Count the drafts of a step: tokens of each row, and how many of them were accepted."""
        self.num_drafts += int(np.count_nonzero(num_drafted))
        self.num_draft_tokens += sum(num_drafted.tolist())
        num_with = np.bincount(num_accepted).tolist()  # drafts with no accepted token, with one, ...
        self.num_accepted += [0] * (len(num_with) - 1 - len(self.num_accepted))
        num_with_more = 0
        for place in range(len(num_with) - 1, 0, -1):
            num_with_more += num_with[place]
            self.num_accepted[place - 1] += num_with_more

    def count_step(self, num_held_blocks: int, num_slots: int, num_tokens: int) -> None:
        """Count one plan.

        Args:
            num_slots: KV slots in the block tables of running sequences; a shared block counts once per table.
            num_tokens: tokens planned into these slots.
        """
        self.num_steps += 1
        self.peak_used_blocks = max(self.peak_used_blocks, num_held_blocks)
        if num_slots:
            self.unused_share_sum += 1.0 - num_tokens / num_slots


@dataclass(slots=True)
class Throughput:
    """Tokens per second of computing time; recent steps have more weight.

    Idle time is left out, because it does not show what the replica could do: an idle replica keeps its last rate.

    Attributes:
        num_computed_tokens: tokens of all steps.
        busy_s: time in which at least one step was computed.
    """

    num_computed_tokens: int = 0
    busy_s: float = 0.0
    _num_tokens: float = 0.0
    _seconds: float = 0.0
    _counted_until: float = -math.inf

    @property
    def tokens_per_s(self) -> float:
        """Return the rate; 0 before the first step."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    @property
    def last_step_at(self) -> float:
        """Return when the latest step was computed; minus infinity before the first."""
        return self._counted_until

    def count_step(self, num_tokens: int, planned_at: float, done_at: float) -> float:
        """Count a computed step; return its seconds. Steps overlap: only the time after the previous step counts."""
        seconds = max(0.0, done_at - max(planned_at, self._counted_until))
        decay = 0.5 ** (seconds / _HALF_LIFE_S)
        self._num_tokens = decay * self._num_tokens + num_tokens
        self._seconds = decay * self._seconds + seconds
        self.num_computed_tokens += num_tokens
        self.busy_s += seconds
        self._counted_until = done_at
        return seconds
