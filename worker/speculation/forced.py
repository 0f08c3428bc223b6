"""ForcedProposer: drafts what constraints leave no choice of (jump-forward), and asks another proposer for the rest.

A grammar may leave no choice of the next text, but of the tokens that spell it. The draft is the spelling of the
tokenizer. It is verified like any other, so the model may still choose another one.
"""

from __future__ import annotations

import numpy as np

from ...proto.block_tables import IntArray, RowArray
from ..step.device_rows import DeviceRows
from .proposer import DraftProposer


class ForcedProposer:
    """Drafts of forced text.

    Args:
        other: proposes for rows without forced text; None drafts nothing for these.
    """

    def __init__(self, other: DraftProposer | None, rows: DeviceRows) -> None:
        self._other = other
        self._rows = rows

    def forget(self, rows: RowArray) -> None:
        if self._other is not None:
            self._other.forget(rows)

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        forced = [
            self._rows.logits_processors.forced_ids(row, max_len)
            for row, max_len in zip(rows.tolist(), max_lens.tolist(), strict=True)
        ]
        if self._other is not None and not any(forced):
            return self._other.propose(rows, max_lens)
        lens = np.array([len(own) for own in forced], np.int32)
        is_free = lens == 0
        if is_free.all():
            return lens
        token_ids = np.array([token_id for own in forced for token_id in own], np.int32)
        self._rows.write_drafts(rows[~is_free], lens[~is_free], token_ids)
        if self._other is not None and is_free.any():
            lens[is_free] = self._other.propose(rows[is_free], max_lens[is_free])
        return lens
