"""PlanDeltas: changes between two plans that the next plan carries to the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....proto.block_tables import IntArray, RowArray
from ....proto.codec import NO_INTS
from ...sequences.sequence import Sequence


class PlanDeltas:
    """Rows released, block tables trimmed, tokens chosen and sequences forked since the last plan."""

    def __init__(self) -> None:
        self._released: list[int] = []
        self._selected: dict[int, int] = {}  # row |-> token
        self._trimmed: dict[int, int] = {}  # row |-> blocks that its table keeps
        self._forks: dict[int, tuple[Sequence, Sequence]] = {}  # seq_id of the child |-> child and parent

    @property
    def num_forks(self) -> int:
        return len(self._forks)

    def __bool__(self) -> bool:
        return bool(self._released or self._selected or self._trimmed or self._forks)

    @property
    def has_changed_rows(self) -> bool:
        """Return whether the next plan carries more than released rows."""
        return bool(self._selected or self._trimmed or self._forks)

    def release_row(self, row: int) -> None:
        """Add a row that was emptied; what was to change in it is dropped."""
        self._released.append(row)
        self._selected.pop(row, None)
        self._trimmed.pop(row, None)

    def select_token(self, row: int, token_id: int) -> None:
        """Add the token with which a beam search continues a row."""
        self._selected[row] = token_id

    def trim_rows(self, rows: IntArray | RowArray, lens: IntArray) -> None:
        """Add rows whose block tables were shortened to `lens` blocks."""
        self._trimmed.update(zip(rows.tolist(), lens.tolist(), strict=True))

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Add a beam that continues another beam; the next plan starts it."""
        self._forks[child.seq_id] = child, parent

    def cancel_fork(self, child: Sequence) -> bool:
        """Drop a fork. Returns False if it is not pending."""
        return self._forks.pop(child.seq_id, None) is not None

    def take_forks(self) -> Iterable[tuple[Sequence, Sequence]]:
        """Return all pending forks, as (child, parent), and forget them."""
        forks, self._forks = self._forks, {}
        return forks.values()

    def take_trimmed(self) -> tuple[IntArray, IntArray]:
        """Return the rows whose tables were shortened and the lengths of these, and forget them."""
        if not self._trimmed:
            return NO_INTS, NO_INTS
        trimmed, self._trimmed = self._trimmed, {}
        return np.array([*trimmed], np.int32), np.array([*trimmed.values()], np.int32)

    def forget_rows(self) -> None:
        """Forget the changes of rows: the ranks start with empty ones. Forks stay pending."""
        self._released, self._selected, self._trimmed = [], {}, {}

    def take(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return released rows, rows of chosen tokens and the chosen tokens, and forget them."""
        if not self._released and not self._selected:  # as in most steps
            return NO_INTS, NO_INTS, NO_INTS
        released = np.array(self._released, np.int32)
        rows, token_ids = (
            np.array([*self._selected], np.int32),
            np.array([*self._selected.values()], np.int32),
        )
        self._released, self._selected = [], {}
        return released, rows, token_ids
