"""Drafts of a step recorded as graphs: all forward passes of a draft head, and all sampling.

Positions, slots and random keys follow from a row's length on the device, so that one transfer and one launch draft
for all rows, also for those whose accepted tokens the host does not know yet. The first pass has as many pairs of
each row as a step with drafts may bring it, and a graph has a place for each token that a row may draft. Rows with
fewer are padding in the others, which writes nothing.

There are two graphs for each number of rows, since truncation by top_k, top_p and min_p takes more kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.decode_splits import split_decodes
from ...kernels.gumbel import random_keys
from ...proto.block_tables import IntArray, RowArray
from ...proto.errors import first_line
from ..attention import AttentionInputs, LayerCache, OwnTokens
from ..memory.host_to_device import pack, to_device, to_device_once, unpack
from ..models.drafts.draft_head import DraftHead
from ..sampling.sampler import Sampler
from ..sampling.sampling_table import SamplingBatch
from ..step.device_rows import DeviceRows
from .graph_shapes import decode_shapes
from .graphs import NO_SLOT, GraphBackend, Recording

_log = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """Inputs of N rows, besides the features of their pairs.

    Attributes:
        rows: [N] int64.
        lens: [N] int64, known tokens up to the later token of the last pair.
        counts: [N] int64, pairs, which are at the positions ``lens - 1 - counts`` to ``lens - 2``; 0 for padding.
        limits: [N] int64, tokens to draft.
        own: [N] int64, indices of the rows that this rank attends for, with data-parallel attention; then -1.
        temperature, top_k, top_p, min_p: as in SamplingBatch.
        seeds: [N] int64.
        is_truncated: [N] bool, rows with top_k, top_p or min_p.
    """

    rows: Tensor
    lens: Tensor
    counts: Tensor
    limits: Tensor
    own: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    is_truncated: Tensor

    def first(self, num_rows: int) -> _Inputs:
        return _Inputs(*(each[:num_rows] for each in self))


class DraftGraphs:
    """Graphs of one rank's part of a draft head.

    Args:
        caches: the head's KV cache.
        num_places: tokens that a row may draft.
        all_ranks: collective that returns whether its argument is true on all ranks.

    Attributes:
        num_pairs: most pairs of a row in the first pass, those of its newest token and of each accepted draft.
    """

    def __init__(
        self,
        rows: DeviceRows,
        head: DraftHead,
        sampler: Sampler,
        caches: list[LayerCache],
        block_size: int,
        num_places: int,
        backend: GraphBackend,
        all_ranks: Callable[[bool], bool],
    ) -> None:
        self._rows, self._head, self._sampler, self._caches = rows, head, sampler, caches
        self._block_size, self._num_places = block_size, num_places
        self.num_pairs = 1 + num_places
        self._backend, self._all_ranks = backend, all_ranks
        self._recordings: dict[tuple[int, bool], Recording] = {}  # rows, and whether some are truncated
        self._max_rows = rows.lens.size
        self._sizes = [shape.num_decodes for shape in decode_shapes(self._max_rows, self._max_rows)]
        empty = np.empty(0, np.int32)
        padding = self._pack(np.empty(0, np.int64), empty, empty, empty)
        self._packed = to_device_once(pack(padding).numpy(), rows.token_ids.device)
        self._inputs = _Inputs(*unpack(self._packed, padding))
        self._features: Tensor | None = None  # [max_rows * num_pairs, F]
        self._drafts = rows.token_ids.new_zeros(self._max_rows, num_places)

    def draft(
        self, rows: RowArray, lens: IntArray, counts: IntArray, limits: IntArray, features: Tensor
    ) -> None:
        """Draft as `sample_drafts` does, except that truncated rows of several ranks keep no more than candidates.

        Args:
            rows, lens, counts, limits: [n], as in _Inputs, without the accepted tokens of unsettled steps.
            features: [n * num_pairs, F], of the pairs of each row; those of padding are any.
        """
        assert self._features is not None, "the graphs are recorded"
        size = next(size for size in self._sizes if size >= rows.size)
        recording = self._recordings[size, bool(self._is_truncated(rows).any())]
        arrays = self._pack(rows, lens, counts, limits)
        self._packed.copy_(to_device_once(pack(arrays).numpy(), self._packed.device))
        if (accepted := self._rows.unsettled.accepted) is not None:
            gained = accepted.index_select(0, self._inputs.rows[: rows.size])
            self._inputs.lens[: rows.size].add_(gained)
            self._inputs.counts[: rows.size].add_(gained)
        self._features[: len(features)].copy_(features)
        recording.replay()
        self._write(rows, limits)

    def record_all(self, dtype: torch.dtype) -> bool:
        """Record all graphs, those of most rows first, or none if a rank cannot; called on all ranks.

        Args:
            dtype: of the features.

        Returns:
            whether they are recorded.
        """
        shape = self._max_rows * self.num_pairs, self._head.num_features
        self._features = torch.zeros(shape, dtype=dtype, device=self._packed.device)
        for size in reversed(self._sizes):
            for is_truncated in (True, False):
                recording = self._record(size, is_truncated)
                if not self._all_ranks(recording is not None):
                    self._recordings.clear()
                    _log.warning("drafts are not recorded: a rank cannot record those of %d rows", size)
                    return False
                assert recording is not None
                self._recordings[size, is_truncated] = recording
        return True

    def _record(self, size: int, is_truncated: bool) -> Recording | None:
        def compute() -> Tensor:
            return self._run(size, is_truncated)

        self._backend.warm_up(compute)
        try:
            return self._backend.record(compute)
        except RuntimeError as error:
            _log.warning("drafts of %d rows cannot be recorded: %s", size, first_line(error))
            return None

    def _run(self, size: int, is_truncated: bool) -> Tensor:
        """Draft from the buffers; this is the recorded function."""
        inputs, drafts = self._inputs.first(size), self._drafts[:size]
        tables = self._rows.device_tables.ids.index_select(0, inputs.rows)
        hidden = self._compute_pairs(inputs, tables)
        for place in range(self._num_places):
            token_ids = self._sample(self._head.logits(hidden), inputs, place, is_truncated)
            drafts[:, place].copy_(token_ids)
            if place + 1 < self._num_places:
                hidden = self._advance(token_ids, hidden, inputs, place, tables)
        return drafts

    def _sample(self, logits: Tensor, inputs: _Inputs, place: int, is_truncated: bool) -> Tensor:
        keys = random_keys(inputs.seeds, inputs.lens + place)
        batch = SamplingBatch(inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, keys)
        return self._sampler.sample_recorded(logits, batch, inputs.is_truncated if is_truncated else None)

    def _compute_pairs(self, inputs: _Inputs, tables: Tensor) -> Tensor:
        """Compute the pairs of known tokens; return the hidden states of each row's last one."""
        assert self._features is not None
        num_rows, num_pairs = len(inputs.rows), self.num_pairs
        places = torch.arange(num_pairs, device=tables.device)
        is_live = (places < inputs.counts.unsqueeze(1)).flatten()
        positions = ((inputs.lens - 1 - inputs.counts).unsqueeze(1) + places).flatten()
        positions = positions.masked_fill(~is_live, 0)
        token_ids = self._rows.token_ids[inputs.rows.repeat_interleave(num_pairs), positions + 1]
        own = (inputs.own.unsqueeze(1) * num_pairs + places).masked_fill(inputs.own.unsqueeze(1) < 0, -1)
        attention = self._attention(
            positions, is_live, tables.repeat_interleave(num_pairs, dim=0), own.flatten()
        )
        combined = self._head.combine(self._features[: len(positions)])
        hidden = self._head.forward(token_ids, positions, combined, self._caches, attention)
        last = (inputs.counts - 1).clamp(min=0) + num_pairs * torch.arange(num_rows, device=tables.device)
        return hidden.index_select(0, last)

    def _advance(
        self, token_ids: Tensor, hidden: Tensor, inputs: _Inputs, place: int, tables: Tensor
    ) -> Tensor:
        """Compute the pairs of the tokens of a place; return the hidden states for the next one."""
        is_live = inputs.limits > place + 1
        # The pair of the first drafted token and the hidden state before it is at the newest known token.
        positions = (inputs.lens + (place - 1)).masked_fill(~is_live, 0)
        attention = self._attention(positions, is_live, tables, inputs.own)
        return self._head.forward(token_ids, positions, hidden, self._caches, attention)

    def _attention(self, positions: Tensor, is_live: Tensor, tables: Tensor, own: Tensor) -> AttentionInputs:
        """Return the inputs of attention of N tokens, each a sequence of its own.

        Args:
            is_live: [N] bool; the others are padding.
            tables: [N, M], block tables.
            own: [N], as in _Inputs.
        """
        own_tokens, partition = None, self._rows.partition
        if partition is not None:
            index = own.clamp(min=0)
            own_tokens = OwnTokens(index, own.masked_fill(own < 0, len(own)))
            positions, is_live = positions.index_select(0, index), is_live.index_select(0, index) & (own >= 0)
            tables = tables.index_select(0, index)
        blocks = tables.gather(1, (positions // self._block_size).unsqueeze(1)).squeeze(1).long()
        slots = blocks * self._block_size + positions % self._block_size
        if partition is not None:
            partition.renumber(tables, slots, self._block_size)
        lens = (positions + 1).masked_fill(~is_live, 0).int()
        return AttentionInputs(
            num_decodes=len(lens),
            slot_mapping=slots.masked_fill(~is_live, NO_SLOT),
            block_tables=tables,
            query_start=torch.zeros(1, dtype=torch.int32, device=lens.device),
            seq_lens=lens,
            splits=split_decodes(lens, tables.shape[1] * self._block_size),
            own_tokens=own_tokens,
        )

    def _is_truncated(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        sampling = self._rows.sampling
        return sampling.filtered[rows] & ~sampling.greedy[rows]

    def _pack(
        self, rows: RowArray, lens: IntArray, counts: IntArray, limits: IntArray
    ) -> list[npt.NDArray[np.generic]]:
        """Return the arrays of _Inputs for some rows, with padding behind them."""
        sampling, partition = self._rows.sampling, self._rows.partition
        own = np.arange(rows.size)
        if partition is not None:
            own = np.flatnonzero(partition.has(self._rows.tables.ids[rows, 0]))

        def padded(
            values: npt.NDArray[np.generic], dtype: npt.DTypeLike, padding: int = 0
        ) -> npt.NDArray[np.generic]:
            array = np.full(self._max_rows, padding, dtype)
            array[: values.size] = values
            return array

        return [
            padded(rows, np.int64),
            padded(lens, np.int64),
            padded(counts, np.int64),
            padded(limits, np.int64),
            padded(own, np.int64, -1),
            padded(np.where(sampling.greedy[rows], 0, sampling.temperature[rows]), np.float32),
            padded(sampling.top_k[rows], np.int64),
            padded(sampling.top_p[rows], np.float64),
            padded(sampling.min_p[rows], np.float32),
            padded(sampling.seed[rows], np.int64),
            padded(self._is_truncated(rows), np.bool_),
        ]

    def _write(self, rows: RowArray, limits: IntArray) -> None:
        """Write the drafts behind the known tokens of their rows."""
        places = np.arange(self._num_places)
        is_drafted = places < limits[:, None]
        positions = (self._rows.lens[rows][:, None] + places)[is_drafted].astype(np.int32)
        drafts = self._drafts[: rows.size].flatten()
        if not is_drafted.all():
            drafts = drafts[to_device(np.flatnonzero(is_drafted), drafts.device, torch.int64)]
        self._rows.write(np.repeat(rows, limits), positions, drafts)
