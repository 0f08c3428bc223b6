"""The sampler: each row's next token as a pure function of (logits, parameters, seed, position).

Each rank has the logits of its part of the vocabulary. Ranks gather candidates, and whole logits only for rows whose
nucleus is larger than the candidates. Every rank computes the same tokens from the gathered numbers.

- Greedy rows and rows without truncation need one candidate per rank: the largest logit, or the largest sum of logit
  and Gumbel noise (kernels.gumbel).
- Rows with top_k, top_p or min_p need the NUM_CANDIDATES most likely tokens of each rank and the sum over the
  vocabulary. To learn which rows need more than the candidates, the host of a GPU would have to wait: it takes
  candidates for rows with a small top_k, and gathers and truncates the whole logits of the others.

Kernels read each row's logits once for the first kind and twice for the second. They apply the logits processors
while reading and write no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels import dispatch
from ...kernels.logits import LogitsProcessors, apply_logits_processors, process_logits
from ...kernels.sampling import (
    log_sum_exp,
    sample_full,
    sample_greedy,
    sample_masked,
    sample_top_k_top_p,
    topk_tokens,
    truncation_mask,
)
from ...proto.block_tables import IntArray, RowArray
from ..comm.communicator import Communicator
from ..comm.shard import Shard
from ..memory.host_to_device import to_device
from .logits_processors import LogitsProcessorState
from .sampling_table import SamplingBatch, SamplingTable

NUM_CANDIDATES = 128
# Rows of GPUs with at most this top_k take candidates. They have all tokens that it keeps, unless half of a rank's
# candidates are as likely as its last one: then some of these equals have no chance.
MAX_CANDIDATE_TOP_K = NUM_CANDIDATES // 2
# Rows whose logits ranks on GPUs gather at a time, which bounds the memory.
MAX_GATHERED_ROWS = 128

# Ranks exchange token ids as float32, together with logits; float32 is exact below this.
MAX_VOCAB_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the unprocessed logits, before temperature and truncation, of the rows that report them.

    Attributes:
        index: [n] int32, indices of these rows among the sampled rows.
        chosen: [n] float32, of the sampled tokens.
        ranks: [n] int32, 1 for the most likely token of the vocabulary; tokens that are as likely share a rank.
        top_ids: [n, k] int64, most likely first; k is the largest number that any row reports.
        top: [n, k] float32.
    """

    index: IntArray
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    def select(self, kept: RowArray) -> SampledLogprobs:
        """Return the entries of `kept` sampled rows (ascending), with `index` into `kept`."""
        entries = np.flatnonzero(np.isin(self.index, kept))
        index = np.searchsorted(kept, self.index[entries]).astype(np.int32)
        on_device = to_device(entries, self.chosen.device, torch.int64)
        tensors = (self.chosen, self.ranks, self.top_ids, self.top)
        return SampledLogprobs(index, *(tensor[on_device] for tensor in tensors))

    def columns(self) -> list[Tensor]:
        """Return the tensors in the order and the dtypes of proto.step.Logprobs."""
        return [self.chosen, self.ranks, self.top_ids.int(), self.top]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Most likely tokens of N rows in descending order; ties are ordered by token id.

    Attributes:
        values: [N, K] float32, logits over temperature.
        token_ids: [N, K] int32.
        floor: [N]; every token above it is among the candidates. -inf if all tokens are candidates.
        log_total: [N], log of the sum of exp over the whole vocabulary.
    """

    values: Tensor
    token_ids: Tensor
    floor: Tensor
    log_total: Tensor


class Sampler:
    """Samples the rows of a step; every method is a collective of the tensor-parallel group.

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
        """Logits of a row on each rank."""
        return self._shard.padded_len

    def sample(
        self,
        logits: Tensor,
        table: SamplingTable,
        rows: IntArray | RowArray,
        lens: IntArray | RowArray,
        processor_state: LogitsProcessorState | None = None,
        gained: Tensor | None = None,
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """Sample one token per row.

        Args:
            logits: [N, padded_len] float32.
            table: sampling parameters of all rows.
            rows: [N], the rows in `table`; a row with drafted tokens repeats, by ascending length.
            lens: [N], each sequence's length, which is the position of its new token.
            processor_state: logits processors of all rows; None applies none.
            gained: [R] on the device, tokens that are not in `lens`, of rows whose processors need none; None for
                none.

        Returns:
            token ids [N] int32, the same on every rank, and the log-probabilities that rows report, if any do.
        """
        processors = None if processor_state is None else processor_state.gather(rows, lens)
        processed = logits if processor_state is None else processor_state.apply_custom(logits, rows, lens)
        if processors is not None and self._applies_first(logits, processors, table, rows):
            # Applied once for all kinds of rows.
            processed, processors = apply_logits_processors(processed, processors), None
        token_ids = self.sample_tokens(processed, processors, table, rows, lens, gained)
        reports = table.num_logprobs[rows] >= 0
        if not np.count_nonzero(reports):
            return token_ids, None
        reporting = np.flatnonzero(reports).astype(np.int32)
        num_top = int(table.num_logprobs[rows].max())
        index = None if reporting.size == len(rows) else to_device(reporting, self._device, torch.int64)
        chosen = token_ids if index is None else token_ids[index]
        candidates = logits
        if table.reports_allowed[rows].any():
            if processors is not None:
                processed = apply_logits_processors(logits, processors)
            is_restricted = to_device(table.reports_allowed[rows], self._device, torch.bool)
            candidates = torch.where(is_restricted.unsqueeze(1), processed, logits)
        logprobs = self.logprobs(logits, chosen, num_top, index, candidates)
        return token_ids, SampledLogprobs(reporting, *logprobs)

    def _applies_first(
        self, logits: Tensor, processors: LogitsProcessors, table: SamplingTable, rows: IntArray | RowArray
    ) -> bool:
        """Return whether the processors are applied before the ops, which apply only masks as they read."""
        if dispatch.has_kernels(logits):
            return False
        return bool(_is_truncated(table, rows).any()) or not processors.has_only_masks

    def logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor,
        num_top: int,
        rows: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probabilities and ranks of given tokens, and the most likely tokens with theirs.

        Args:
            logits: [N, padded_len] float32.
            token_ids: [n] int32.
            rows: [n] int64, the row of `logits` for each token; None for all N rows in order.
            candidates: the logits with -inf for tokens that are not to be among the most likely ones.

        Returns:
            of the given tokens [n] float32, and their ranks [n] int32; the most likely token ids [n, num_top] int64
            and theirs [n, num_top] float32.
        """
        chosen = self._logits_of(logits, token_ids, rows)
        num_greater = _count_greater(logits, chosen, rows).float()  # exact below MAX_VOCAB_SIZE
        num_local = min(num_top, logits.shape[1])
        top, top_columns, log_total = topk_tokens(logits, num_local, None, rows)
        if candidates is not None and candidates is not logits:
            top, top_columns, _ = topk_tokens(candidates, num_local, None, rows)
        local = (
            top, (top_columns + self._shard.start).float(), num_greater.unsqueeze(1), log_total.unsqueeze(1)
        )  # fmt: skip
        gathered = self._comm.all_gather(torch.cat(local, dim=-1))
        top, top_ids, num_greater, log_total = gathered.split_with_sizes([num_local, num_local, 1, 1], dim=-1)
        log_total = log_sum_exp(log_total.squeeze(2).t().contiguous()).unsqueeze(1)
        merged = _concat_ranks(top)
        top, order = merged.topk(min(num_top, merged.shape[1]), dim=-1)
        return (
            chosen - log_total.squeeze(1),
            1 + num_greater.sum(dim=0).squeeze(1).int(),
            _concat_ranks(top_ids).gather(1, order).long(),
            top - log_total,
        )

    def _logits_of(self, logits: Tensor, token_ids: Tensor, rows: Tensor | None) -> Tensor:
        """Return the logits of given tokens, one per row, [n], from the ranks that have them."""
        columns = token_ids.long() - self._shard.start
        is_local = (columns >= 0) & (columns < len(self._shard))
        if rows is None:
            rows = torch.arange(len(logits), device=logits.device)
        local = logits[rows, columns.masked_fill(~is_local, 0)].masked_fill(~is_local, -torch.inf)
        return self._comm.all_gather(local).amax(dim=0)

    def sample_tokens(
        self,
        logits: Tensor,
        processors: LogitsProcessors | None,
        table: SamplingTable,
        rows: IntArray | RowArray,
        lens: IntArray | RowArray,
        gained: Tensor | None = None,
    ) -> Tensor:
        """Sample each kind of rows by its own op; an op gets all logits and the indices of its rows."""
        if np.count_nonzero(table.greedy[rows]) == rows.size:
            return self._sample_greedy(logits, processors)
        is_truncated = _is_truncated(table, rows)
        is_gathered = is_truncated & self._gathers(logits, table, rows)
        token_ids = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        kinds = (
            (~is_truncated, self._sample_full),
            (is_truncated & ~is_gathered, self._sample_top_k_top_p),
            (is_gathered, self._sample_gathered),
        )
        for members, op in kinds:
            if members.all():
                return op(logits, processors, table.gather(rows, lens, self._device, gained), None)
            if members.any():
                batch = table.gather(rows[members], lens[members], self._device, gained)
                index = to_device(np.flatnonzero(members), self._device, torch.int64)
                token_ids[index] = op(logits, processors, batch, index)
        return token_ids

    def sample_recorded(self, logits: Tensor, batch: SamplingBatch, is_truncated: Tensor | None) -> Tensor:
        """Sample one token per row in a graph, which is recorded before the host knows the rows.

        Truncated rows of several ranks keep no more than the candidates, which is enough for drafts.

        Args:
            is_truncated: [N] bool, rows with top_k, top_p or min_p and a temperature; None if there are none.
        """
        token_ids = self._sample_full(logits, None, batch, None)
        if is_truncated is None:
            return token_ids
        # The others keep one token: the search for candidates would take long for a row that keeps all.
        kept = batch._replace(
            temperature=batch.temperature.where(is_truncated, 1), top_k=batch.top_k.where(is_truncated, 1)
        )
        return self._sample_top_k_top_p(logits, None, kept, None).where(is_truncated, token_ids)

    def _sample_greedy(self, logits: Tensor, processors: LogitsProcessors | None) -> Tensor:
        return self._best_of_ranks(*sample_greedy(logits, self._shard.start, None, processors))

    def _sample_full(
        self, logits: Tensor, processors: LogitsProcessors | None, batch: SamplingBatch, index: Tensor | None
    ) -> Tensor:
        first_id = self._shard.start
        return self._best_of_ranks(
            *sample_full(logits, batch.temperature, batch.keys, first_id, index, processors)
        )

    def _sample_top_k_top_p(
        self, logits: Tensor, processors: LogitsProcessors | None, batch: SamplingBatch, index: Tensor | None
    ) -> Tensor:
        has_kernels = dispatch.has_kernels(logits)
        if has_kernels and self._comm.size == 1:
            return sample_top_k_top_p(logits, *batch, index, processors)
        candidates = self._gather_candidates(logits, processors, batch, index)
        keep, is_exact = _truncate_candidates(candidates, batch, self._shard.full_len)
        token_ids = sample_masked(candidates.values, candidates.token_ids, keep, batch.keys)
        if has_kernels:
            return token_ids
        inexact = (~is_exact).nonzero().squeeze(1)
        if inexact.numel():
            whole = self._gather_logits(logits, processors, inexact if index is None else index[inexact])
            token_ids[inexact] = sample_top_k_top_p(whole, *batch.select(inexact))
        return token_ids

    def _gathers(
        self, logits: Tensor, table: SamplingTable, rows: IntArray | RowArray
    ) -> npt.NDArray[np.bool_] | np.bool_:
        """Return which rows are sampled from the whole logits, without looking at candidates."""
        if self._comm.size == 1 or not dispatch.has_kernels(logits):
            return np.False_
        return table.top_k[rows] > MAX_CANDIDATE_TOP_K

    def _sample_gathered(
        self, logits: Tensor, processors: LogitsProcessors | None, batch: SamplingBatch, index: Tensor | None
    ) -> Tensor:
        """Sample rows from the logits of all ranks, without a wait of the host."""
        rows = torch.arange(len(logits), device=logits.device) if index is None else index
        batches = zip(*(parameter.split(MAX_GATHERED_ROWS) for parameter in batch), strict=True)
        sampled = [
            sample_top_k_top_p(self._gather_logits(logits, processors, own), *parameters)
            for own, parameters in zip(rows.split(MAX_GATHERED_ROWS), batches, strict=True)
        ]
        return torch.cat(sampled)

    def _gather_logits(self, logits: Tensor, processors: LogitsProcessors | None, rows: Tensor) -> Tensor:
        """Return processed logits of some rows, of all ranks: [len(rows), vocabulary]."""
        gathered = self._comm.all_gather(process_logits(logits, rows, processors))
        # Only the last ranks' parts are padded.
        return _concat_ranks(gathered)[:, : self._shard.full_len]

    def _best_of_ranks(self, best: Tensor, token_ids: Tensor) -> Tensor:
        """Return the tokens of the largest scores of all ranks, [N] int32; the lowest rank wins a tie.

        Args:
            best: [N], this rank's largest scores.
            token_ids: [N] int32, their tokens.
        """
        if self._comm.size == 1:
            return token_ids
        local = torch.stack((best, token_ids.float()), dim=-1)
        best, token_ids = self._comm.all_gather(local).unbind(-1)
        return token_ids.gather(0, best.argmax(dim=0, keepdim=True)).squeeze(0).int()

    def _gather_candidates(
        self, logits: Tensor, processors: LogitsProcessors | None, batch: SamplingBatch, index: Tensor | None
    ) -> _Candidates:
        """Return the most likely tokens of each rank, sorted together."""
        num_local = min(NUM_CANDIDATES, logits.shape[1])
        values, columns, log_total = topk_tokens(logits, num_local, batch.temperature, index, processors)
        sends_all = num_local == logits.shape[1]
        floor = torch.full_like(values[:, :1], -torch.inf) if sends_all else values[:, -1:]
        gathered = self._comm.all_gather(
            torch.cat((values, (columns + self._shard.start).float(), floor, log_total.unsqueeze(1)), dim=-1)
        )
        values, token_ids, floor, log_total = gathered.split_with_sizes([num_local, num_local, 1, 1], dim=-1)
        return _sort_candidates(
            _concat_ranks(values),
            _concat_ranks(token_ids).int(),
            floor.amax(0).squeeze(1),
            log_sum_exp(log_total.squeeze(2).t().contiguous()),
        )


def _is_truncated(table: SamplingTable, rows: IntArray | RowArray) -> npt.NDArray[np.bool_]:
    return table.filtered[rows] & ~table.greedy[rows]


def _count_greater(logits: Tensor, bounds: Tensor, rows: Tensor | None) -> Tensor:
    """Return how many logits of each row are above its bound, [n].

    NumPy counts on a CPU: 30 us per row of 151,936 logits instead of torch's 240 us, beside the 600 us of
    `topk_tokens` (AMD EPYC, one thread).
    """
    if logits.is_cuda:
        selected = logits if rows is None else logits[rows]
        return (selected > bounds.unsqueeze(1)).sum(dim=-1)
    on_host, indices = logits.numpy(), range(len(logits)) if rows is None else rows.tolist()
    pairs = zip(indices, bounds.numpy(), strict=True)
    return torch.tensor([np.count_nonzero(on_host[row] > bound) for row, bound in pairs])


def _concat_ranks(gathered: Tensor) -> Tensor:
    """[size, N, C] by rank -> [N, size * C]."""
    return gathered.transpose(0, 1).flatten(1)


def _sort_candidates(values: Tensor, token_ids: Tensor, floor: Tensor, log_total: Tensor) -> _Candidates:
    """Return _Candidates of [N, K] values and token ids that are in any order."""
    token_ids, by_id = token_ids.sort(dim=-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return _Candidates(values, token_ids.gather(1, order), floor, log_total)


def _truncate_candidates(
    candidates: _Candidates, batch: SamplingBatch, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Apply top_k, top_p and min_p.

    Returns:
        the candidates to keep, [N, K] bool; and the rows for which these are exactly the tokens that truncation of
        the whole vocabulary keeps, [N] bool.
    """
    keep = truncation_mask(
        candidates.values, candidates.log_total, vocab_size, batch.top_k, batch.top_p, batch.min_p
    )
    num_above_floor = (candidates.values > candidates.floor.unsqueeze(1)).sum(dim=-1)
    has_all = candidates.floor == -torch.inf
    is_exact = (keep.sum(dim=-1) <= num_above_floor) & (
        (batch.top_k >= vocab_size) | (batch.top_k <= num_above_floor)
    )
    return keep, is_exact | has_all
