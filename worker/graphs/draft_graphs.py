"""Drafts of a step recorded as graphs: all forward passes of a draft head after the first one, and all sampling.

Positions, slots and random keys of the drafted tokens follow from a row's length on the device, so that one transfer
and one launch draft for all rows. A graph has a place for each token that a row may draft; rows that draft fewer are
padding in the further places, which writes nothing.

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
from ..attention import AttentionInputs, LayerCache
from ..memory.host_to_device import pack, to_device, to_device_once, unpack
from ..models.drafts.draft_head import DraftHead
from ..sampling.sampler import Sampler
from ..sampling.sampling_table import SamplingBatch
from ..step.device_rows import DeviceRows
from .graph_shapes import decode_shapes
from .graphs import NO_SLOT, GraphBackend, Recording

_log = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """Inputs of N rows, besides their hidden states.

    Attributes:
        rows: [N] int64.
        lens: [N] int64, known tokens.
        limits: [N] int64, tokens to draft; 0 for padding.
        temperature, top_k, top_p, min_p: as in SamplingBatch.
        seeds: [N] int64.
        is_truncated: [N] bool, rows with top_k, top_p or min_p.
    """

    rows: Tensor
    lens: Tensor
    limits: Tensor
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
        self._backend, self._all_ranks = backend, all_ranks
        self._recordings: dict[tuple[int, bool], Recording] = {}  # rows, and whether some are truncated
        self._max_rows = rows.lens.size
        self._sizes = [shape.num_decodes for shape in decode_shapes(self._max_rows, self._max_rows)]
        padding = self._pack(np.empty(0, np.int64), np.empty(0, np.int32))
        self._packed = to_device_once(pack(padding).numpy(), rows.token_ids.device)
        self._inputs = _Inputs(*unpack(self._packed, padding))
        self._hidden: Tensor | None = None  # [max_rows, E]
        self._drafts = rows.token_ids.new_zeros(self._max_rows, num_places)

    def draft(self, rows: RowArray, limits: IntArray, hidden: Tensor) -> bool:
        """Draft as `sample_drafts` does, except that truncated rows of several ranks keep no more than candidates.

        Returns:
            whether there is a graph for so many rows; nothing is drafted without one.
        """
        size = next((size for size in self._sizes if size >= rows.size), 0)
        is_truncated = self._is_truncated(rows)
        recording = self._recordings.get((size, bool(is_truncated.any())))
        if recording is None or self._hidden is None:
            return False
        arrays = self._pack(rows, limits)
        self._packed.copy_(to_device_once(pack(arrays).numpy(), self._packed.device))
        self._hidden[: rows.size].copy_(hidden)
        recording.replay()
        self._write(rows, limits)
        return True

    def record_all(self, dtype: torch.dtype) -> None:
        """Record all graphs, those of most rows first, or none if a rank cannot; called on all ranks.

        Args:
            dtype: of the hidden states that the head returns.
        """
        shape = self._max_rows, self._head.hidden_size
        self._hidden = torch.zeros(shape, dtype=dtype, device=self._packed.device)
        for size in reversed(self._sizes):
            for is_truncated in (True, False):
                recording = self._record(size, is_truncated)
                if not self._all_ranks(recording is not None):
                    self._recordings.clear()
                    _log.warning("drafts are not recorded: a rank cannot record those of %d rows", size)
                    return
                assert recording is not None
                self._recordings[size, is_truncated] = recording

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
        assert self._hidden is not None
        hidden, inputs, drafts = self._hidden[:size], self._inputs.first(size), self._drafts[:size]
        tables = self._rows.device_tables.ids.index_select(0, inputs.rows)
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

    def _advance(
        self, token_ids: Tensor, hidden: Tensor, inputs: _Inputs, place: int, tables: Tensor
    ) -> Tensor:
        """Compute the pairs of the tokens of a place; return the hidden states for the next one."""
        is_live = inputs.limits > place + 1
        # The pair of the first drafted token and the hidden state before it is at the newest known token.
        positions = (inputs.lens + (place - 1)).masked_fill(~is_live, 0)
        blocks = tables.gather(1, (positions // self._block_size).unsqueeze(1)).squeeze(1).long()
        slots = (blocks * self._block_size + positions % self._block_size).masked_fill(~is_live, NO_SLOT)
        lens = (positions + 1).masked_fill(~is_live, 0).int()
        attention = AttentionInputs(
            num_decodes=len(lens),
            slot_mapping=slots,
            block_tables=tables,
            query_start=torch.zeros(1, dtype=torch.int32, device=lens.device),
            seq_lens=lens,
            splits=split_decodes(lens, tables.shape[1] * self._block_size),
        )
        return self._head.forward(token_ids, positions, hidden, self._caches, attention)

    def _is_truncated(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        sampling = self._rows.sampling
        return sampling.filtered[rows] & ~sampling.greedy[rows]

    def _pack(self, rows: RowArray, limits: IntArray) -> list[npt.NDArray[np.generic]]:
        """Return the arrays of _Inputs for some rows, with padding behind them."""
        sampling = self._rows.sampling

        def padded(values: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
            array = np.zeros(self._max_rows, dtype)
            array[: rows.size] = values
            return array

        return [
            padded(rows, np.int64),
            padded(self._rows.lens[rows], np.int64),
            padded(limits, np.int64),
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
