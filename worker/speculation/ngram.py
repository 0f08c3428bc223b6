"""NgramProposer: continues the longest repeated suffix of a sequence as its earlier occurrence went on.

Prompt lookup (Saxena, 2023) over prompt and output, with a suffix automaton instead of a search.
"""

from __future__ import annotations

import numpy as np

from ...kernels.suffix_automaton import SuffixIndex, make_suffix_index
from ...proto.block_tables import IntArray, RowArray
from ...proto.config import SpeculativeConfig
from ..step.device_rows import DeviceRows

_NO_LIMIT = np.iinfo(np.int32).max


class NgramProposer:
    """Drafts of repeated text. The suffixes of a row are indexed when the row drafts for the first time."""

    def __init__(self, config: SpeculativeConfig, rows: DeviceRows) -> None:
        self._min_len = config.prompt_lookup_min
        self._max_len = config.prompt_lookup_max or _NO_LIMIT
        self._rows = rows
        self._indices: dict[int, SuffixIndex] = {}  # row |-> index of its tokens
        self._num_indexed: IntArray = np.zeros_like(rows.lens)

    def forget(self, rows: RowArray) -> None:
        for row in rows.tolist():
            self._indices.pop(row, None)
        self._num_indexed[rows] = 0

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        news = self._rows.read_tokens(rows, self._num_indexed[rows], self._rows.lens[rows])
        self._num_indexed[rows] = self._rows.lens[rows]
        drafts = [
            self._continue(row, new, max_len)
            for row, new, max_len in zip(rows.tolist(), news, max_lens.tolist(), strict=True)
        ]
        lens = np.array([draft.size for draft in drafts], np.int32)
        if lens.any():
            self._rows.write_drafts(rows, lens, np.concatenate(drafts))
        return lens

    def _continue(self, row: int, new: IntArray, max_len: int) -> IntArray:
        """Index the new tokens of a row; return its draft, which is no longer than the suffix that it continues."""
        index = self._indices.get(row)
        if index is None:
            index = self._indices[row] = make_suffix_index()
        index.extend(new)
        token_ids, match_len = index.propose(max_len, self._min_len, self._max_len)
        return token_ids[:match_len]
