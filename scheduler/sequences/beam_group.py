"""BeamGroup: the running sequences of one beam search."""

from __future__ import annotations

from ...proto.block_tables import IntArray
from ...proto.codec import FloatArray
from .beam_search import BeamSearch, Child


class BeamGroup:
    """Beams step together: each waits, frozen, until all have been computed, then the search chooses.

    Attributes:
        search: the algorithm and its state.
        members: seq_ids of its running beams, in the order of the search.
        num_answers: how many of its answers are told.
    """

    def __init__(self, search: BeamSearch, num_answers: int) -> None:
        self.search = search
        self.members: list[int] = []
        self.num_answers = num_answers
        self._candidates: dict[int, tuple[IntArray, FloatArray]] = {}  # seq_id |-> of the present step

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that a rank must report for each beam."""
        return self.search.num_candidates

    def is_waiting_for(self, seq_id: int) -> bool:
        """Must the beam still be computed before the search can choose?"""
        return seq_id not in self._candidates

    def deposit(self, seq_id: int, token_ids: IntArray, logprobs: FloatArray) -> bool:
        """Takes a beam's candidates, likeliest first; True when those of every beam are in."""
        count = self.num_candidates
        self._candidates[seq_id] = token_ids[:count], logprobs[:count]
        return len(self._candidates) == len(self.members)

    def advance(self) -> list[Child]:
        """The beams of the next step; empty when the search is over. `members` are still the old ones."""
        candidates = [self._candidates[seq_id] for seq_id in self.members]
        self._candidates.clear()
        return self.search.advance(candidates)
