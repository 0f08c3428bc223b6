"""FlatLogprobs: log-probabilities of many positions in a few lists, as vLLM's `flat_logprobs` returns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, overload

from ..text.requests.outputs import Logprob, PositionLogprobs


@dataclass(slots=True, eq=False)
class FlatLogprobs(Sequence[PositionLogprobs]):
    """A sequence of positions without an object per position, which the garbage collector would visit.

    Attributes:
        start_indices, end_indices: of each position, its part of the other lists; empty for the first token of a
            prompt.
        token_ids, logprobs, ranks, decoded_tokens: of all positions, as in Logprob.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Sequence[PositionLogprobs | None]) -> Self:
        """Return positions in this form."""
        flat = cls()
        for position in positions:
            flat.append(position)
        return flat

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs.of([self[each] for each in range(len(self))[index]])
        entries = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[each]: Logprob(self.logprobs[each], self.ranks[each], self.decoded_tokens[each])
            for each in entries
        }

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
