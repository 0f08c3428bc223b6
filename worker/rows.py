"""Rows: what a rank remembers of its running sequences between steps. Deltas come with the plans."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.block_tables import put_entries
from ..proto.block_tables import BlockTables, IntArray
from ..proto.config import EngineConfig
from ..proto.step import NewSequence, PromptScoring, RowSampling, StepPlan
from .constraints import Constraints
from .parallel import Shard
from .transfer import to_device, to_device_together

# Below this a temperature is taken for 0: dividing by it would leave float32.
GREEDY_TEMPERATURE = 1e-5


class Rows:
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
        constraints: what rows do to their logits before.

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
        self.constraints = Constraints(shard, self.token_ids)

    def apply(self, plan: StepPlan) -> None:
        """Steps 1 to 3 and 5 of the plan: released, new, appended and chosen. The caller compares digests."""
        self.tables.release(plan.released_rows)
        self.device_tables.release(plan.released_rows)
        self.decoding[plan.released_rows] = False
        self.constraints.release(plan.released_rows)
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
        self.constraints.append(rows, token_ids)
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
        self.constraints.put(sequence)


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
        put_entries(self.ids, to_device(entries, self.ids.device, torch.int32))
        self._num_sent[:] = self._tables.lens


class SamplingTable:
    """How each row samples, [R] each; what is switched off has a value that changes nothing.

    Attributes:
        greedy: takes the likeliest token.
        filtered: draws from what top_k, top_p or min_p leave.
        num_logprobs: how many likeliest tokens to report; -1 where none and not the sampled one's either.
        scoring: which tokens of the prompt to score, as in RowSampling.
        scores: where there is scoring.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.greedy = np.zeros(num_rows, dtype=np.bool_)
        self.filtered = np.zeros(num_rows, dtype=np.bool_)
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int32)
        self.scoring: list[PromptScoring | None] = [None] * num_rows
        self.scores = np.zeros(num_rows, dtype=np.bool_)

    def put(self, row: int, sampling: RowSampling) -> None:
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        self.greedy[row] = sampling.temperature < GREEDY_TEMPERATURE
        self.filtered[row] = top_k < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        self.temperature[row] = sampling.temperature
        self.top_k[row] = top_k
        # 2 where it is off: rounded sums of probabilities reach 1 too early.
        self.top_p[row] = sampling.top_p if sampling.top_p < 1 else 2.0
        self.min_p[row] = sampling.min_p
        self.seed[row] = np.uint64(sampling.seed & (1 << 64) - 1).astype(np.int64)
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.scoring[row] = sampling.scoring
        self.scores[row] = sampling.scoring is not None
