"""The sampler: each row's next token, a pure function of (logits, settings, seed, position).

Each rank has the logits of its part of the vocabulary. Candidates are gathered, never whole logits, except for rows
whose nucleus is wider than the candidates. From the gathered numbers every rank works out the same tokens.

- Greedy rows and rows that draw from the whole vocabulary need one candidate a rank: the largest logit, or the
  largest sum of logit and Gumbel noise (kernels.gumbel).
- Rows with top_k, top_p or min_p need the likeliest NUM_CANDIDATES of each rank and the sum over the vocabulary; a
  GPU that has the whole vocabulary cuts it as it is.

Kernels read each row's logits once for the first, twice for the second, adjust them as they read and write none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels import dispatch
from ...kernels.gumbel import random_keys
from ...kernels.logits import LogitsProcessors, apply_logits_processors
from ...kernels.sampling import sample_among, sample_full, sample_greedy, sample_top_k_top_p, topk_tokens
from ...proto.block_tables import IntArray
from ..comm.communicator import Communicator, Shard
from ..memory.host_to_device import to_device, to_device_together
from .candidates import Candidates, SamplingBatch, kept_candidates, sort_candidates
from .logits_processors import LogitsProcessorState
from .sampling_table import SamplingTable

NUM_CANDIDATES = 128

# Token ids travel beside logits as float32, which is exact below this.
MAX_VOCAB_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the model itself, before temperature and cuts, for rows that asked.

    Attributes:
        index: [n] int32, which of the sampled rows.
        chosen: [n] float32.
        top_ids: [n, k] int64, likeliest first; k is the most that any row asked for.
        top: [n, k] float32.
    """

    index: IntArray
    chosen: Tensor
    top_ids: Tensor
    top: Tensor


class Sampler:
    """Samples the rows of a step together with the other ranks.

    Args:
        shard: this rank's part of the vocabulary; logits are [N, shard.padded_len], -inf where there is no token.
    """

    def __init__(self, shard: Shard, comm: Communicator, device: torch.device) -> None:
        assert shard.full_len <= MAX_VOCAB_SIZE
        self._shard = shard
        self._comm = comm
        self._device = device

    @property
    def num_logits(self) -> int:
        """Of a row, on each rank."""
        return self._shard.padded_len

    def sample(
        self,
        logits: Tensor,
        table: SamplingTable,
        rows: IntArray,
        lens: IntArray,
        constraints: LogitsProcessorState | None = None,
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """One token a row.

        Args:
            logits: [N, padded_len] float32.
            table: how rows sample.
            rows: [N] int32, the rows in `table`.
            lens: [N] int32, each sequence's length, which is the position of its new token.
            constraints: what rows do to their logits first; None: nothing.

        Returns:
            token ids [N] int32, the same on every rank, and the log-probabilities that were asked for.
        """
        adjustments = None if constraints is None else constraints.adjustments(rows, lens)
        changed = logits
        if adjustments is not None and not dispatch.has_kernels(logits):
            # Once for all kinds of rows.
            changed, adjustments = apply_logits_processors(logits, adjustments), None
        token_ids = self._choose(changed, adjustments, table, rows, lens)
        wants_logprobs = np.flatnonzero(table.num_logprobs[rows] >= 0).astype(np.int32)
        if wants_logprobs.size == 0:
            return token_ids, None
        index = to_device(wants_logprobs, self._device, torch.int64)
        num_top = int(table.num_logprobs[rows].max())
        chosen, top_ids, top = self.logprobs(logits, token_ids[index], num_top, index)
        return token_ids, SampledLogprobs(wants_logprobs, chosen, top_ids, top)

    def _choose(
        self,
        logits: Tensor,
        adjustments: LogitsProcessors | None,
        table: SamplingTable,
        rows: IntArray,
        lens: IntArray,
    ) -> Tensor:
        """Each kind of rows by its op; the ops take all logits, and which rows of them are meant."""
        if table.greedy[rows].all():
            return self._sample_greedy(logits, adjustments)
        is_cut = table.filtered[rows] & ~table.greedy[rows]
        token_ids = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        for members, choose in ((~is_cut, self._sample_full), (is_cut, self._sample_top_k_top_p)):
            if members.all():
                return choose(logits, adjustments, self._settings_of(table, rows, lens), None)
            if members.any():
                draw = self._settings_of(table, rows[members], lens[members])
                index = to_device(np.flatnonzero(members), self._device, torch.int64)
                token_ids[index] = choose(logits, adjustments, draw, index)
        return token_ids

    def _settings_of(self, table: SamplingTable, rows: IntArray, lens: IntArray) -> SamplingBatch:
        temperature, top_k, top_p, min_p, seeds, positions = to_device_together(
            [
                np.where(table.greedy[rows], np.float32(0), table.temperature[rows]),
                table.top_k[rows],
                table.top_p[rows].astype(np.float64),
                table.min_p[rows],
                table.seed[rows],
                lens.astype(np.int64),
            ],
            self._device,
        )
        return SamplingBatch(temperature, top_k, top_p, min_p, random_keys(seeds, positions))

    def _sample_greedy(self, logits: Tensor, adjustments: LogitsProcessors | None) -> Tensor:
        return self._best_of_ranks(*sample_greedy(logits, self._shard.start, None, adjustments))

    def _sample_full(
        self, logits: Tensor, adjustments: LogitsProcessors | None, draw: SamplingBatch, index: Tensor | None
    ) -> Tensor:
        first_id = self._shard.start
        return self._best_of_ranks(
            *sample_full(logits, draw.temperature, draw.keys, first_id, index, adjustments)
        )

    def _sample_top_k_top_p(
        self, logits: Tensor, adjustments: LogitsProcessors | None, draw: SamplingBatch, index: Tensor | None
    ) -> Tensor:
        if self._comm.size == 1 and dispatch.has_kernels(logits):
            return sample_top_k_top_p(logits, *draw, index, adjustments)
        candidates = self._gather_candidates(logits, adjustments, draw, index)
        keep, covered = kept_candidates(candidates, draw, self._shard.full_len)
        token_ids = sample_among(candidates.values, candidates.token_ids, keep, draw.keys)
        uncovered = (~covered).nonzero().squeeze(1)
        if uncovered.numel():
            # Only the last ranks' parts are padded.
            everything = self._gather_rows(
                logits, adjustments, uncovered if index is None else index[uncovered]
            )
            everything = everything[:, : self._shard.full_len]
            token_ids[uncovered] = sample_top_k_top_p(everything, *draw.select(uncovered))
        return token_ids

    def _gather_rows(self, logits: Tensor, adjustments: LogitsProcessors | None, rows: Tensor) -> Tensor:
        """Adjusted logits of some rows, of all ranks: [len(rows), size * padded_len]."""
        if adjustments is not None:
            logits = apply_logits_processors(logits, adjustments)
        return _beside_each_other(self._comm.all_gather(logits[rows]))

    def _best_of_ranks(self, best: Tensor, token_ids: Tensor) -> Tensor:
        """Token of the largest score, the first of equals; each rank gives its best, [N] and [N] int32."""
        if self._comm.size == 1:
            return token_ids
        local = torch.stack((best, token_ids.float()), dim=-1)
        best, token_ids = self._comm.all_gather(local).unbind(-1)
        return token_ids.gather(0, best.argmax(dim=0, keepdim=True)).squeeze(0).int()

    def _gather_candidates(
        self, logits: Tensor, adjustments: LogitsProcessors | None, draw: SamplingBatch, index: Tensor | None
    ) -> Candidates:
        """The likeliest tokens of each rank, sorted together."""
        num_local = min(NUM_CANDIDATES, logits.shape[1])
        values, columns, log_total = topk_tokens(logits, num_local, draw.temperature, index, adjustments)
        sent_all = num_local == logits.shape[1]
        floor = torch.full_like(values[:, :1], -torch.inf) if sent_all else values[:, -1:]
        gathered = self._comm.all_gather(
            torch.cat((values, (columns + self._shard.start).float(), floor, log_total.unsqueeze(1)), dim=-1)
        )
        values, token_ids, floor, log_total = gathered.split_with_sizes([num_local, num_local, 1, 1], dim=-1)
        return sort_candidates(
            _beside_each_other(values),
            _beside_each_other(token_ids).int(),
            floor.amax(0).squeeze(1),
            log_total.logsumexp(0).squeeze(1),
        )

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of tokens, and of the likeliest beside each; every rank calls it.

        Args:
            logits: [N, padded_len] float32.
            token_ids: [n] int32.
            rows: [n] int64, whose logits are each token's; None: those of all N rows.

        Returns:
            of the tokens [n] float32; the likeliest token ids [n, num_top] int64, and theirs [n, num_top] float32.
        """
        num_local = min(num_top, logits.shape[1])
        top, top_columns, log_total = topk_tokens(logits, num_local, None, rows)
        columns = token_ids.long() - self._shard.start
        owned = (columns >= 0) & (columns < len(self._shard))
        if rows is None:
            rows = torch.arange(len(logits), device=logits.device)
        chosen = logits[rows, columns.masked_fill(~owned, 0)].masked_fill(~owned, -torch.inf)
        local = (top, (top_columns + self._shard.start).float(), chosen.unsqueeze(1), log_total.unsqueeze(1))
        gathered = self._comm.all_gather(torch.cat(local, dim=-1))
        top, top_ids, chosen, log_total = gathered.split_with_sizes([num_local, num_local, 1, 1], dim=-1)
        log_total = log_total.logsumexp(dim=0)
        merged = _beside_each_other(top)
        top, order = merged.topk(min(num_top, merged.shape[1]), dim=-1)
        return (
            (chosen.amax(dim=0) - log_total).squeeze(1),
            _beside_each_other(top_ids).gather(1, order).long(),
            top - log_total,
        )


def _beside_each_other(gathered: Tensor) -> Tensor:
    """[size, N, C] by rank -> [N, size * C]."""
    return gathered.transpose(0, 1).flatten(1)
