"""BeamGroup: the sequences of one beam search."""

from __future__ import annotations

from ...proto.block_tables import IntArray
from ...proto.codec import FloatArray
from .beam_search import BeamSearch, Continuation


class BeamGroup:
    """The beams of one search, which step together: each is frozen until all have been computed.

    Args:
        first: seq_id of the sequence that begins the search.

    Attributes:
        search: the algorithm and its state.
        members: seq_ids of its beams, in the order of the search.
        num_outputs: number of hypotheses that are returned.
    """

    def __init__(self, search: BeamSearch, num_outputs: int, first: int) -> None:
        self.search = search
        self.members = [first]
        self.num_outputs = num_outputs
        self._candidates: dict[int, tuple[IntArray, FloatArray]] = {}  # seq_id |-> candidates of this step

    @property
    def num_candidates(self) -> int:
        """Return the number of most likely tokens that a rank must report for each beam."""
        return self.search.num_candidates

    def is_waiting_for(self, seq_id: int) -> bool:
        """Return whether the candidates of a beam are still missing."""
        return seq_id not in self._candidates

    def add_candidates(self, seq_id: int, token_ids: IntArray, logprobs: FloatArray) -> bool:
        """Add a beam's candidates, most likely first; return whether those of every beam are known."""
        count = self.num_candidates
        self._candidates[seq_id] = token_ids[:count], logprobs[:count]
        return len(self._candidates) == len(self.members)

    def advance(self) -> list[Continuation]:
        """Return the beams of the next step, empty at the end of the search. Does not change `members`."""
        candidates = [self._candidates[seq_id] for seq_id in self.members]
        self._candidates.clear()
        return self.search.advance(candidates)
