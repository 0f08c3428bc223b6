"""Policies: who runs next, who gives way, and how. Pure functions over sequences and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..sequences.sequence import Sequence

AdmissionKey = Callable[[Sequence], Any]


def first_come_first_served(sequence: Sequence) -> int:
    """By arrival, as Orca admits (Yu et al., OSDI 2022)."""
    return sequence.arrival


def by_priority(sequence: Sequence) -> tuple[int, int]:
    """The highest priority first, then by arrival."""
    return -sequence.priority, sequence.arrival


def shortest_prefill_first(sequence: Sequence) -> tuple[int, int]:
    """The shortest prompt first, as in shortest-job-first (Smith, 1956), where the prompt is what is known."""
    return sequence.num_prompt_tokens, sequence.arrival


# policy |-> the order in which it admits. `fair` and `longest-prefix` look at more than the sequence (waiting.py).
ADMISSION_KEYS: Mapping[str, AdmissionKey] = {
    "fcfs": first_come_first_served,
    "priority": by_priority,
    "shortest-prefill": shortest_prefill_first,
}


def service(num_prompt_tokens: int, num_output_tokens: int, weight: float) -> float:
    """What a tenant's virtual counter grows by; an output token counts as two prompt tokens, as in its source."""
    return (num_prompt_tokens + 2 * num_output_tokens) / weight


def counter_on_arrival(own: float, others: Iterable[float]) -> float:
    """A tenant that was idle starts level with the least served active one: idling earns no credit."""
    return max(own, min(others, default=own))


def goes_before(sequence: Sequence, other: Sequence) -> bool:
    """May `sequence` take blocks or a row from `other`: it has a higher priority, or the same and came first."""
    return (*by_priority(sequence), sequence.seq_id) < (*by_priority(other), other.seq_id)


def choose_victim(
    running: Iterable[Sequence], beneficiary: Sequence, num_computed_tokens: Callable[[Sequence], int]
) -> Sequence | None:
    """Who gives way to `beneficiary`: the lowest priority, then the least computed work to lose; or None.

    Only sequences that the beneficiary goes before can be chosen, so the oldest of the highest priority always
    gets on, and each in its turn.
    """
    candidates = (sequence for sequence in running if goes_before(beneficiary, sequence))
    return min(
        candidates,
        key=lambda sequence: (
            sequence.priority,
            num_computed_tokens(sequence),
            -sequence.arrival,
            -sequence.seq_id,
        ),
        default=None,
    )


@dataclass(slots=True)
class CostModel:
    """What a token's computation and a block's transfer cost, as measured.

    Attributes:
        swap_blocks_per_s: blocks that move between device and host memory a second, each way.
        prefill_tokens_per_s: tokens that a step computes a second when prompts fill it.
    """

    swap_blocks_per_s: float
    prefill_tokens_per_s: float = 0.0
    _num_launched_tokens: int = 0
    _launched_s: float = 0.0

    @property
    def has_launched(self) -> bool:
        """A step was observed before it was done."""
        return self._num_launched_tokens > 0

    def observe(self, num_tokens: int, seconds: float, is_done: bool = True) -> None:
        """A step that prompts fill took `seconds`; later ones count more (weight 0.1).

        Args:
            is_done: the rank has waited for it. On a GPU a step that samples nothing is only launched, and its
                computation is part of the time of the next step that samples: they are counted together.
        """
        self._num_launched_tokens += num_tokens
        self._launched_s += seconds
        if not is_done or self._launched_s <= 0:
            return
        rate = self._num_launched_tokens / self._launched_s
        self._num_launched_tokens, self._launched_s = 0, 0.0
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if old == 0.0 else 0.9 * old + 0.1 * rate

    def swap_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Out and in again, against computing the tokens once more (as weighed by Kwon et al., SOSP 2023)."""
        if self.swap_blocks_per_s <= 0:
            return False
        if self.prefill_tokens_per_s <= 0:
            return True
        return 2 * num_blocks / self.swap_blocks_per_s < num_tokens / self.prefill_tokens_per_s

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that a prompt takes at the measured rate; 0 while nothing is known."""
        return num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
