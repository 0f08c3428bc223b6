"""SamplingTable: sampling parameters of running rows as arrays."""

from __future__ import annotations

import numpy as np

from ...proto.step import PromptScoring, RowSampling

# Below this a temperature is taken for 0: dividing by it would leave float32.
GREEDY_TEMPERATURE = 1e-5


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
