"""ForcedProposer: drafts what constraints leave no choice of (jump-forward), and asks another proposer for the rest.

A grammar may leave no choice of the next text, but of the tokens that spell it. The draft is the spelling of the
tokenizer. It is verified like any other, so the model may still choose another one.
"""

from __future__ import annotations

import numpy as np

from ...proto.block_tables import IntArray
from ..device_rows import DeviceRows
from .proposer import DraftProposer, Drafts


class ForcedProposer:
    """Drafts of forced text.

    Args:
        other: proposes for rows without forced text.
    """

    def __init__(self, other: DraftProposer, rows: DeviceRows) -> None:
        self._other = other
        self._rows = rows

    def forget(self, rows: IntArray) -> None:
        self._other.forget(rows)

    def propose(self, rows: IntArray, max_lens: IntArray) -> Drafts:
        drafts = self._other.propose(rows, max_lens)
        forced = [
            self._rows.logits_processors.forced_ids(row, max_len)
            for row, max_len in zip(rows.tolist(), max_lens.tolist(), strict=True)
        ]
        if not any(forced):
            return drafts
        others = np.split(drafts.token_ids, np.cumsum(drafts.lens)[:-1])
        parts = [np.array(own, np.int32) if own else other for own, other in zip(forced, others, strict=True)]
        return Drafts(np.array([part.size for part in parts], np.int32), np.concatenate(parts))
