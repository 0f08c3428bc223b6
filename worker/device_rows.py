"""DeviceRows: what a rank remembers of its running sequences between steps. Deltas come with the plans."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.block_tables import update_block_tables
from ..proto.block_tables import BlockTables, IntArray
from ..proto.config import EngineConfig
from ..proto.step import NewSequence, StepPlan
from .comm.shard import Shard
from .memory.host_to_device import to_device, to_device_together
from .sampling.logits_processors import LogitsProcessorState
from .sampling.sampling_table import SamplingTable


class DeviceRows:
    """The persistent state of `max_num_seqs` sequences.

    What the scheduler determines lies in numpy, so that no step waits for the device; the tokens, which the
    device determines, lie on the device.

    Attributes:
        max_len: most tokens that a row may compute.
        tables: block tables, equal to the scheduler's.
        device_tables: the same on the device.
        token_ids: [R, max_len + 1] int32 on the device, prompt and answer.
        lens: [R] int32, tokens known.
        num_computed: [R] int32, tokens whose KV is in the cache.
        decoding: [R] bool, rows that compute their newest token in each step.
        sampling: how each row samples.
        logits_processors: what rows do to their logits before.

    Args:
        shard: this rank's part of the vocabulary.
    """

    def __init__(self, config: EngineConfig, shard: Shard, device: torch.device) -> None:
        num_rows, max_len = config.scheduler.max_num_seqs, config.model.max_model_len
        self.max_len = max_len
        self.tables = BlockTables(num_rows, config.max_blocks_per_seq)
        self.device_tables = DeviceTables(self.tables, device)
        self.token_ids = torch.zeros(num_rows, max_len + 1, dtype=torch.int32, device=device)
        self.lens: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.decoding = np.zeros(num_rows, dtype=np.bool_)
        self.sampling = SamplingTable(num_rows, config.model.vocab_size)
        self.logits_processors = LogitsProcessorState(shard, self.token_ids)

    def apply(self, plan: StepPlan) -> None:
        """Steps 1 to 3 and 5 of the plan: released, new, appended and chosen. The caller compares digests."""
        self.tables.release(plan.released_rows)
        self.device_tables.release(plan.released_rows)
        self.decoding[plan.released_rows] = False
        self.logits_processors.release(plan.released_rows)
        for sequence in plan.new:
            self._put(sequence)
        self.tables.append(plan.appended_rows, plan.appended_ids)
        self.device_tables.update()
        if plan.chosen_rows.size:
            self._replace_newest(plan.chosen_rows, plan.chosen_ids)

    def mark_computed(self, rows: IntArray, lens: IntArray) -> None:
        """The KV of these rows is in the cache up to `lens`."""
        self.num_computed[rows] = lens

    def append(self, rows: IntArray, token_ids: Tensor) -> None:
        """Gives rows their sampled tokens; from now on they decode.

        Args:
            token_ids: [N] int32 on the device, by row.
        """
        self._write(rows, self.lens[rows], token_ids)
        self.logits_processors.append(rows, token_ids)
        self.lens[rows] += 1
        self.decoding[rows] = True

    def _replace_newest(self, rows: IntArray, token_ids: IntArray) -> None:
        self._write(rows, self.lens[rows] - 1, to_device(token_ids, self.token_ids.device, torch.int32))

    def _write(self, rows: IntArray, positions: IntArray, token_ids: Tensor) -> None:
        places = [rows.astype(np.int64), positions.astype(np.int64)]
        self.token_ids[tuple(to_device_together(places, self.token_ids.device))] = token_ids

    def _put(self, sequence: NewSequence) -> None:
        row, length = sequence.row, len(sequence.token_ids)
        self.token_ids[row, :length] = to_device(sequence.token_ids, self.token_ids.device, torch.int32)
        self.lens[row] = length
        self.num_computed[row] = sequence.num_computed_tokens
        self.decoding[row] = False
        self.tables.append(np.full(len(sequence.block_ids), row, dtype=np.int32), sequence.block_ids)
        self.sampling.put(row, sequence.sampling)
        self.logits_processors.put(sequence)


class DeviceTables:
    """A rank's block tables where its kernels read them.

    They follow BlockTables by the entries that each step adds, sent together. On a CPU they share its memory.

    Attributes:
        ids: [R, M] int32 on the device.
    """

    def __init__(self, tables: BlockTables, device: torch.device) -> None:
        self._tables = tables
        self._shared = device.type == "cpu"
        self.ids = torch.from_numpy(tables.ids) if self._shared else torch.from_numpy(tables.ids).to(device)
        self._num_sent = tables.lens.copy()

    def release(self, rows: IntArray) -> None:
        """What these rows get from now on is new."""
        self._num_sent[rows] = 0

    def update(self) -> None:
        """Sends what was appended since the last update; the host does not wait for it."""
        if self._shared:
            return
        added = self._tables.lens - self._num_sent
        rows = np.repeat(np.arange(len(added)), added)
        if rows.size == 0:
            return
        ends = np.cumsum(added)
        index = np.arange(rows.size) + np.repeat(self._tables.lens - ends, added)
        entries = np.stack((rows, index, self._tables.ids[rows, index]), axis=1)
        update_block_tables(self.ids, to_device(entries, self.ids.device, torch.int32))
        self._num_sent[:] = self._tables.lens
