"""DraftProposer: the interface of a source of drafted tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ...proto.block_tables import IntArray


class Drafts(NamedTuple):
    """Drafted tokens of some rows.

    Attributes:
        lens: [n] int32, number of drafted tokens of each row; may be 0.
        token_ids: [sum of lens] int32.
    """

    lens: IntArray
    token_ids: IntArray


class DraftProposer(Protocol):
    """Source of drafted tokens. All ranks propose the same ones, from what all of them know."""

    def forget(self, rows: IntArray) -> None:
        """Forget the sequences of rows that were emptied."""
        ...

    def propose(self, rows: IntArray, max_lens: IntArray) -> Drafts:
        """Propose tokens that may follow the newest token of each row.

        Args:
            rows: [n], rows that decode in the step.
            max_lens: [n], most tokens of each row.
        """
        ...
