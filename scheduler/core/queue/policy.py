"""Policies: admission order, choice of victims, and swap or recompute. Pure functions of sequences and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....proto.stream import Submit
from ...sequences.sequence import Sequence

AdmissionKey = Callable[[Sequence], Any]


def rank_of(submit: Submit) -> int:
    """Return the rank of a request: a smaller one goes first, whereas a higher priority does."""
    return -submit.priority


def first_come_first_served(sequence: Sequence) -> int:
    """Order by arrival, as Orca admits (Yu et al., OSDI 2022)."""
    return sequence.arrival


def by_rank(sequence: Sequence) -> tuple[int, int]:
    """Order by priority, highest first, then by arrival."""
    return sequence.rank, sequence.arrival


def shortest_prefill_first(sequence: Sequence) -> tuple[int, int]:
    """Order by prompt length: shortest-job-first (Smith, 1956) by the part of the job that is known."""
    return sequence.num_prompt_tokens, sequence.arrival


def by_precedence(sequence: Sequence) -> tuple[int, int, int]:
    """Order running sequences, unambiguously: `by_rank`, then by seq_id."""
    return sequence.rank, sequence.arrival, sequence.seq_id


# policy |-> its order of admission. `fair` and `longest-prefix` depend on more than the sequence (waiting.py).
ADMISSION_KEYS: Mapping[str, AdmissionKey] = {
    "fcfs": first_come_first_served,
    "priority": by_rank,
    "shortest-prefill": shortest_prefill_first,
}


def service(num_prompt_tokens: int, num_output_tokens: int, weight: float) -> float:
    """Return the increment of a tenant's virtual token counter; an output token counts as two prompt tokens."""
    return (num_prompt_tokens + 2 * num_output_tokens) / weight


def counter_on_arrival(own: float, others: Iterable[float]) -> float:
    """Return the counter of a tenant that was idle: at least the least active one, so that idling earns no credit."""
    return max(own, min(others, default=own))


def goes_before(sequence: Sequence, other: Sequence) -> bool:
    """Return whether `sequence` may take blocks or a row from `other`: higher priority, or the same and earlier."""
    return by_precedence(sequence) < by_precedence(other)


def choose_victim(
    running: Iterable[Sequence], beneficiary: Sequence, num_computed_tokens: Callable[[Sequence], int]
) -> Sequence | None:
    """Return the sequence to preempt for `beneficiary`: lowest priority, then least computed work; or None.

    Candidates are the sequences that the beneficiary goes before, so the oldest of the highest priority always
    makes progress.
    """
    candidates = (sequence for sequence in running if goes_before(beneficiary, sequence))
    return max(
        candidates,
        key=lambda sequence: (
            sequence.rank,
            -num_computed_tokens(sequence),
            sequence.arrival,
            sequence.seq_id,
        ),
        default=None,
    )


@dataclass(slots=True)
class CostModel:
    """Measured costs of computing a token and of swapping a block.

    Attributes:
        swap_blocks_per_s, swap_states_per_s: blocks, and states of sequences, that move between device and host
            memory per second, each way.
        prefill_tokens_per_s: tokens computed per second in steps full of prompt tokens; 0 until measured.
        decode_step_s: time of a step without prompt tokens; 0 until measured.
        max_num_batched_tokens: tokens of a full step.
    """

    swap_blocks_per_s: float
    swap_states_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    max_num_batched_tokens: int = 1
    _num_launched_tokens: int = 0
    _launched_s: float = 0.0

    @property
    def has_launched(self) -> bool:
        """Return whether a step was observed before it was done."""
        return self._num_launched_tokens > 0

    def observe(self, num_tokens: int, seconds: float, is_done: bool = True) -> None:
        """Record that a step full of prompt tokens took `seconds`; the average gives it weight 0.1.

        Args:
            is_done: the rank has waited for the step. On a GPU a step that samples nothing is only launched, and
                its computation is part of the time of the next step that samples: the two are counted together.
        """
        self._num_launched_tokens += num_tokens
        self._launched_s += seconds
        if not is_done or self._launched_s <= 0:
            return
        rate = self._num_launched_tokens / self._launched_s
        self._num_launched_tokens, self._launched_s = 0, 0.0
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if old == 0.0 else 0.9 * old + 0.1 * rate

    def observe_decode(self, seconds: float) -> None:
        """Record that a step without prompt tokens took `seconds`; the average gives it weight 0.1."""
        old = self.decode_step_s
        self.decode_step_s = seconds if old == 0.0 else 0.9 * old + 0.1 * seconds

    @property
    def prefill_delay(self) -> float:
        """Return the share of a prompt's time by which it delays a running sequence; 1 until it is measured.

        Steps full of prompt tokens take the place of as many steps without, which would have taken time as well.
        """
        if self.prefill_tokens_per_s <= 0 or self.decode_step_s <= 0:
            return 1.0
        full_step_s = self.max_num_batched_tokens / self.prefill_tokens_per_s
        return max(0.0, 1.0 - self.decode_step_s / full_step_s)

    def swap_is_cheaper(self, num_blocks: int, num_tokens: int, *, has_state: bool = False) -> bool:
        """Compare a swap out and in with recomputing the tokens (as in Kwon et al., SOSP 2023).

        Args:
            has_state: the sequence's state moves too.
        """
        if self.swap_blocks_per_s <= 0 or (has_state and self.swap_states_per_s <= 0):
            return False
        if self.prefill_tokens_per_s <= 0:
            return True
        move_s = num_blocks / self.swap_blocks_per_s
        if has_state:
            move_s += 1 / self.swap_states_per_s
        return 2 * move_s < num_tokens / self.prefill_tokens_per_s
