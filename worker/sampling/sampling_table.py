"""SamplingTable: sampling parameters of the running rows as arrays, and the SamplingBatch gathered from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.gumbel import random_keys
from ...proto.block_tables import IntArray, RowArray
from ...proto.step import PromptScoring, RowSampling
from ..memory.host_to_device import to_device_together

# Lower temperatures count as 0: dividing by them would overflow float32.
GREEDY_TEMPERATURE = 1e-5


class SamplingBatch(NamedTuple):
    """Sampling parameters of N rows of one step, in the argument order of kernels.sampling.sample_top_k_top_p.

    Attributes:
        temperature: [N] float32; 0 for greedy rows.
        top_k: [N] int64.
        top_p: [N] float64.
        min_p: [N] float32.
        keys: [N, 2] int32, of the rows' random numbers.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor

    def select(self, rows: Tensor) -> SamplingBatch:
        """Return the parameters of these rows only."""
        return SamplingBatch(*(parameter[rows] for parameter in self))


class SamplingTable:
    """Sampling parameters of every row, [R] each; a disabled parameter has a value without effect.

    Attributes:
        greedy: rows that take the most likely token.
        filtered: rows with top_k, top_p or min_p.
        num_logprobs: number of most likely tokens to report; -1 if the row reports no log-probabilities at all.
        scoring: prompt tokens to score, as in RowSampling.
        scores: rows that have `scoring`.
        reports_allowed: as in RowSampling.
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
        self.reports_allowed = np.zeros(num_rows, dtype=np.bool_)

    def put(self, row: int, sampling: RowSampling) -> None:
        """Set the parameters of a row."""
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        self.greedy[row] = sampling.temperature < GREEDY_TEMPERATURE
        self.filtered[row] = top_k < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        self.temperature[row] = sampling.temperature
        self.top_k[row] = top_k
        # 2 if disabled: a rounded sum of probabilities can reach 1 before the last token.
        self.top_p[row] = sampling.top_p if sampling.top_p < 1 else 2.0
        self.min_p[row] = sampling.min_p
        self.seed[row] = np.uint64(sampling.seed & (1 << 64) - 1).astype(np.int64)
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.scoring[row] = sampling.scoring
        self.scores[row] = sampling.scoring is not None
        self.reports_allowed[row] = sampling.reports_allowed

    def gather(
        self,
        rows: IntArray | RowArray,
        positions: IntArray | RowArray,
        device: torch.device,
        gained: Tensor | None = None,
    ) -> SamplingBatch:
        """Return the parameters of these rows on the device.

        Args:
            rows: [N].
            positions: [N], of the tokens to sample; with the seeds they determine the random keys.
            gained: [R] on the device, what is added to the positions in each row; None for nothing.
        """
        temperature, top_k, top_p, min_p, seeds, device_positions, *device_rows = to_device_together(
            [
                np.where(self.greedy[rows], np.float32(0), self.temperature[rows]),
                self.top_k[rows],
                self.top_p[rows].astype(np.float64),
                self.min_p[rows],
                self.seed[rows],
                positions.astype(np.int64),
                *([] if gained is None else [rows.astype(np.int64)]),
            ],
            device,
        )
        if gained is not None:
            device_positions = device_positions + gained.index_select(0, device_rows[0])
        return SamplingBatch(temperature, top_k, top_p, min_p, random_keys(seeds, device_positions))
