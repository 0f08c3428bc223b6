"""KnownOutputs: in place of a proposer of drafts, so that a test decides which drafts are right."""

from __future__ import annotations

import numpy as np

from quire.proto.block_tables import IntArray, RowArray
from quire.proto.config import SpeculativeConfig
from quire.worker.step.device_rows import DeviceRows


class KnownOutputs:
    """Proposes the tokens of a known output; one in four is wrong.

    Attributes:
        known: prompt and output of all sequences.
    """

    known: list[list[int]]

    def __init__(self, config: SpeculativeConfig, rows: DeviceRows) -> None:
        self._rows = rows
        self._rng = np.random.default_rng(0)  # the same on all ranks

    def forget(self, rows: RowArray) -> None:
        """Nothing is kept."""

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        self._rows.unsettled.settle()
        lens = self._rows.lens[rows]
        texts = self._rows.read_tokens(rows, np.zeros_like(lens), lens)
        drafts = [self._continue(text.tolist(), most) for text, most in zip(texts, max_lens, strict=True)]
        lens = np.array([len(each) for each in drafts], np.int32)
        if lens.any():
            self._rows.write_drafts(rows, lens, np.concatenate(drafts))
        return lens

    def _continue(self, text: list[int], most: int) -> IntArray:
        whole = next((each for each in self.known if each[: len(text)] == text), [])
        draft = np.array(whole[len(text) : len(text) + most], np.int32)
        return np.where(self._rng.random(draft.size) < 0.25, 11, draft).astype(np.int32)
