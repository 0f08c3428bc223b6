"""DraftModelProposer: a smaller model of the same vocabulary proposes tokens (Leviathan et al., 2023).

Its keys and values are in layers of their own of the same blocks, so that block tables, copies and swaps are those of
the target model. It computes a sequence when the sequence first drafts, and then what was sampled since.

A draft is sampled with the target's parameters and random numbers of its position. Where both models give the same
probabilities, both sample the same token. In general they agree with a probability of at least (1 - d) / (1 + d),
where d is the total variation distance of the two distributions (Daliri, Musco and Suresh, 2024).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ..attention import LayerCache
from ..memory.host_to_device import to_device
from ..models.loader import Model
from ..sampling.sampler import Sampler
from ..step.device_rows import DeviceRows
from .draft_chain import sample_drafts
from .draft_inputs import MAX_DECODED_TOKENS, gather_draft_inputs
from .fused_chain import plan_fused_chain

# Known tokens that the draft model computes in a step, of all rows together. Rows with more to compute draft later.
MAX_CATCH_UP_TOKENS = 512


class DraftModelProposer:
    """Drafts of one rank's part of a draft model.

    Args:
        layers: returns the draft model's KV cache, which is allocated later.
    """

    def __init__(
        self,
        rows: DeviceRows,
        model: Model,
        sampler: Sampler,
        layers: Callable[[], list[LayerCache]],
        block_size: int,
    ) -> None:
        self._rows, self._model, self._sampler = rows, model, sampler
        self._layers, self._block_size = layers, block_size
        self._fused = plan_fused_chain(rows, model, layers, token_offset=0)
        # Tokens whose KV the draft model has, if those that were drafted are accepted.
        self._num_computed: IntArray = np.zeros_like(rows.lens)

    def forget(self, rows: RowArray) -> None:
        self._num_computed[rows] = 0

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        self._rows.unsettled.settle()  # what is to be computed is told by the lengths on the host
        lens = self._rows.lens[rows]
        starts = np.minimum(self._num_computed[rows], lens - 1)
        # Each row catches up with what the rows before it leave of the limit.
        before = np.cumsum(lens - starts) - (lens - starts)
        counts = np.clip(MAX_CATCH_UP_TOKENS - before, 0, lens - starts).astype(np.int32)
        has_some = counts > 0
        is_ready = (starts + counts == lens)[has_some]
        catching_up, own_starts, own_counts = rows[has_some], starts[has_some], counts[has_some]
        limits = max_lens[has_some][is_ready]
        self._num_computed[rows] = starts + counts
        if self._fused is not None and is_ready.any() and own_counts.max() <= MAX_DECODED_TOKENS:
            ends, own_limits = own_starts + own_counts, np.where(is_ready, max_lens[has_some], 0)
            self._fused.compute_and_draft(catching_up, ends, own_counts, own_limits)
            self._num_computed[catching_up[is_ready]] += limits - 1
        else:
            hidden = self._forward(catching_up, own_starts, own_counts)
            index = to_device(np.flatnonzero(is_ready), hidden.device, torch.int64)
            self._draft(catching_up[is_ready], limits, hidden[index])
        drafted: IntArray = np.where(has_some & (starts + counts == lens), max_lens, 0).astype(np.int32)
        return drafted

    def _draft(self, rows: RowArray, limits: IntArray, hidden: Tensor) -> None:
        """Draft up to `limits` tokens of each row; `hidden` is [n, E], of the newest token of each row."""
        if self._fused is not None and rows.size:
            self._fused.continue_from(rows, limits, hidden)
            self._num_computed[rows] += limits - 1
        else:
            sample_drafts(self._rows, self._sampler, rows, limits, hidden, self._model.logits, self._advance)

    def _advance(self, rows: RowArray, positions: IntArray, hidden: Tensor) -> Tensor:
        hidden = self._forward(rows, positions, np.ones_like(positions))
        self._num_computed[rows] = positions + 1
        return hidden

    def _forward(self, rows: RowArray, starts: IntArray, counts: IntArray) -> Tensor:
        """Compute tokens of rows; return the hidden states of each row's last one, [n, E]."""
        inputs = gather_draft_inputs(self._rows, rows, starts, counts, self._block_size)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._layers(), inputs.attention)
        return hidden[to_device(inputs.last, hidden.device, torch.int64)]
