"""DraftProposer: the interface of a source of drafted tokens."""

from __future__ import annotations

from typing import Protocol

from ...proto.block_tables import IntArray, RowArray


class DraftProposer(Protocol):
    """Source of drafted tokens. All ranks propose the same ones, from what all of them know."""

    def forget(self, rows: RowArray) -> None:
        """Forget the sequences of rows that were emptied."""
        ...

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        """Write tokens that may follow the newest token of each row behind it.

        Args:
            rows: [n], rows that decode in the step; at least one.
            max_lens: [n], most tokens of each row.

        Returns:
            [n] int32, the number of tokens of each row; may be 0.
        """
        ...
