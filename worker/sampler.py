"""The sampler: each row's next token, a pure function of (logits, settings, seed, position).

Each rank has the logits of its part of the vocabulary. Candidates are gathered, never whole logits, except for rows
whose nucleus is wider than the candidates. From the gathered numbers every rank works out the same tokens.

- Greedy rows and rows that draw from the whole vocabulary need one candidate a rank: the largest logit, or the
  largest sum of logit and Gumbel noise (kernels.gumbel).
- Rows with top_k, top_p or min_p need the likeliest NUM_CANDIDATES of each rank and the sum over the vocabulary; a
  GPU that has the whole vocabulary cuts it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.gumbel import random_keys
from ..kernels.sampling import draw_among, draw_from_all, draw_from_kept, take_likeliest
from ..proto.block_tables import IntArray
from .candidates import Candidates, Draw, kept_candidates, sort_candidates
from .constraints import Constraints
from .parallel import Communicator, Shard
from .rows import SamplingTable
from .transfer import to_device

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
        constraints: Constraints | None = None,
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """One token a row.

        Args:
            logits: [N, padded_len] float32; becomes scratch.
            table: how rows sample.
            rows: [N] int32, the rows in `table`.
            lens: [N] int32, each sequence's length, which is the position of its new token.
            constraints: what rows do to their logits first; None: nothing.

        Returns:
            token ids [N] int32, the same on every rank, and the log-probabilities that were asked for.
        """
        wants_logprobs = np.flatnonzero(table.num_logprobs[rows] >= 0).astype(np.int32)
        changed = logits
        if constraints is not None and constraints.concern(rows, lens):
            changed = logits.clone() if wants_logprobs.size else logits
            constraints.apply(changed, rows, lens)
        token_ids = self._choose(changed, table, rows, lens)
        if wants_logprobs.size == 0:
            return token_ids, None
        index = to_device(wants_logprobs, self._device, torch.int64)
        num_top = int(table.num_logprobs[rows].max())
        chosen, top_ids, top = self.logprobs(logits[index], token_ids[index], num_top)
        return token_ids, SampledLogprobs(wants_logprobs, chosen, top_ids, top)

    def _choose(self, logits: Tensor, table: SamplingTable, rows: IntArray, lens: IntArray) -> Tensor:
        greedy = table.greedy[rows]
        if greedy.all():
            return self._take_likeliest(logits)
        filtered = table.filtered[rows]
        token_ids = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        for members, choose in (
            (greedy, lambda logits, _: self._take_likeliest(logits)),
            (~greedy & ~filtered, self._draw_from_all),
            (~greedy & filtered, self._draw_from_kept),
        ):
            if members.all():
                return choose(logits, self._settings_of(table, rows, lens))
            if members.any():
                index = to_device(np.flatnonzero(members), self._device, torch.int64)
                token_ids[index] = choose(
                    logits[index], self._settings_of(table, rows[members], lens[members])
                )
        return token_ids

    def _settings_of(self, table: SamplingTable, rows: IntArray, lens: IntArray) -> Draw:
        device = self._device
        return Draw(
            temperature=to_device(table.temperature[rows], device, torch.float32),
            top_k=to_device(table.top_k[rows], device, torch.int64),
            top_p=to_device(table.top_p[rows], device, torch.float64),
            min_p=to_device(table.min_p[rows], device, torch.float32),
            keys=random_keys(
                to_device(table.seed[rows], device, torch.int64), to_device(lens, device, torch.int64)
            ),
        )

    def _take_likeliest(self, logits: Tensor) -> Tensor:
        return self._best_of_ranks(*take_likeliest(logits, first_id=self._shard.start))

    def _draw_from_all(self, logits: Tensor, draw: Draw) -> Tensor:
        return self._best_of_ranks(
            *draw_from_all(logits, draw.temperature, draw.keys, first_id=self._shard.start)
        )

    def _draw_from_kept(self, logits: Tensor, draw: Draw) -> Tensor:
        if logits.is_cuda and self._comm.size == 1:
            return _draw_from_kept_of_all(logits, draw)
        candidates = self._gather_candidates(logits / draw.temperature.unsqueeze(1))
        keep, covered = kept_candidates(candidates, draw, self._shard.full_len)
        token_ids = draw_among(candidates.values, candidates.token_ids, keep, draw.keys)
        uncovered = (~covered).nonzero().squeeze(1)
        if uncovered.numel():
            everything = _beside_each_other(self._comm.all_gather(logits[uncovered]))
            # Only the last ranks' parts are padded.
            everything = everything[:, : self._shard.full_len]
            token_ids[uncovered] = _draw_from_kept_of_all(everything, draw.select(uncovered))
        return token_ids

    def _best_of_ranks(self, best: Tensor, token_ids: Tensor) -> Tensor:
        """Token of the largest score, the first of equals; each rank gives its best, [N] and [N] int32."""
        if self._comm.size == 1:
            return token_ids
        local = torch.stack((best, token_ids.float()), dim=-1)
        best, token_ids = self._comm.all_gather(local).unbind(-1)
        return token_ids.gather(0, best.argmax(dim=0, keepdim=True)).squeeze(0).int()

    def _gather_candidates(self, scaled: Tensor) -> Candidates:
        """The likeliest tokens of each rank, sorted together."""
        num_local = min(NUM_CANDIDATES, scaled.shape[1])
        values, index = scaled.topk(num_local, dim=-1)
        sent_all = num_local == scaled.shape[1]
        floor = torch.full_like(values[:, :1], -torch.inf) if sent_all else values[:, -1:]
        log_total = scaled.logsumexp(dim=-1, keepdim=True)
        gathered = self._comm.all_gather(
            torch.cat((values, (index + self._shard.start).float(), floor, log_total), dim=-1)
        )
        values, token_ids, floor, log_total = gathered.split_with_sizes([num_local, num_local, 1, 1], dim=-1)
        return sort_candidates(
            _beside_each_other(values),
            _beside_each_other(token_ids).int(),
            floor.amax(0).squeeze(1),
            log_total.logsumexp(0).squeeze(1),
        )

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of tokens, and of the likeliest beside each; every rank calls it.

        Args:
            logits: [n, padded_len] float32.
            token_ids: [n] int32.

        Returns:
            of the tokens [n] float32; the likeliest token ids [n, num_top] int64, and theirs [n, num_top] float32.
        """
        token_ids = token_ids.long().unsqueeze(1)
        num_local = min(num_top, logits.shape[1])
        top, top_index = logits.topk(num_local, dim=-1)
        local_ids = token_ids - self._shard.start
        owned = (local_ids >= 0) & (local_ids < len(self._shard))
        chosen = logits.gather(1, local_ids.masked_fill(~owned, 0)).masked_fill(~owned, -torch.inf)
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        gathered = self._comm.all_gather(
            torch.cat((top, (top_index + self._shard.start).float(), chosen, log_total), dim=-1)
        )
        top, top_ids, chosen, log_total = gathered.split_with_sizes([num_local, num_local, 1, 1], dim=-1)
        log_total = log_total.logsumexp(dim=0)
        merged = _beside_each_other(top)
        top, order = merged.topk(min(num_top, merged.shape[1]), dim=-1)
        return (
            (chosen.amax(dim=0) - log_total).squeeze(1),
            _beside_each_other(top_ids).gather(1, order).long(),
            top - log_total,
        )


def _draw_from_kept_of_all(logits: Tensor, draw: Draw) -> Tensor:
    return draw_from_kept(logits, draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.keys)


def _beside_each_other(gathered: Tensor) -> Tensor:
    """[size, N, C] by rank -> [N, size * C]."""
    return gathered.transpose(0, 1).flatten(1)
