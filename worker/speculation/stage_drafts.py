"""Drafts of a model in pipeline stages: the first stage, which embeds the tokens, drafts for all.

It alone has the draft model. Drafts travel ahead of the hidden states: each stage needs their number for the
positions of a step, and the last one their values to verify them.
"""

from __future__ import annotations

import numpy as np
import torch

from ...proto.block_tables import IntArray, RowArray
from ..comm.pipeline import StageLink
from ..memory.host_to_device import to_device
from ..step.device_rows import DeviceRows
from .speculator import DraftProposer


class SentDrafts:
    """DraftProposer of the first stage, which sends to the others what it drafts.

    A message is the number of each row's tokens, and then the tokens, padded to as many as the plan allows.
    """

    def __init__(self, proposer: DraftProposer, rows: DeviceRows, link: StageLink) -> None:
        self._proposer, self._rows, self._link = proposer, rows, link

    def forget(self, rows: RowArray) -> None:
        self._proposer.forget(rows)

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        lens = self._proposer.propose(rows, max_lens)
        message = np.zeros(rows.size + int(max_lens.sum()), np.int32)
        message[: rows.size] = lens
        if lens.any():
            known = self._rows.lens[rows]
            drafts = np.concatenate(self._rows.read_tokens(rows, known, known + lens))
            message[rows.size : rows.size + drafts.size] = drafts
        self._link.send_drafts(to_device(message, self._rows.token_ids.device, torch.int32))
        return lens


class ReceivedDrafts:
    """DraftProposer of a later stage."""

    def __init__(self, rows: DeviceRows, link: StageLink) -> None:
        self._rows, self._link = rows, link

    def forget(self, rows: RowArray) -> None:
        """Do nothing: the first stage remembers the sequences."""

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        message: IntArray = self._link.receive_drafts(rows.size + int(max_lens.sum())).cpu().numpy()
        lens, token_ids = message[: rows.size], message[rows.size :]
        self._rows.unsettled.settle()
        if lens.any():
            self._rows.write_drafts(rows, lens, token_ids[: int(lens.sum())])
        return lens
