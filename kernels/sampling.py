"""Sampling of tokens from logits: greedy, from the full softmax, or after truncation by top_k, top_p and min_p.

A token is sampled as the argmax of value (logit over temperature) plus Gumbel noise (kernels.gumbel). Truncation
applies top_k, top_p and min_p in this order. Each keeps a prefix of the tokens sorted by probability, ties by id;
top_p is relative to the tokens that top_k keeps.

Ops read the model's logits and apply logits processors (kernels.logits) on the fly. `rows` selects rows of the
logits; all other arguments and results have one entry per selected row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import on_gpu
from .gumbel import gumbel_noise
from .logits import LogitsProcessors, Masks, apply_logits_processors
from .native import ops as cpu


@on_gpu("sample_full")
def sample_greedy(
    logits: Tensor,
    vocab_start: int = 0,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, or of a rank's shard of it.

    Args:
        logits: [N, V] float32.
        vocab_start: token id of the first column.
        rows: [M] int64, selected rows; None: all N.
        logits_processors: of all N rows; None: none.

    Returns:
        Logits [M] float32 and token ids [M] int32; the lowest id wins a tie.
    """
    if cpu.supports_logits(logits):
        return cpu.sample_greedy(*_process_but_masks(logits, rows, logits_processors), vocab_start)
    best, index = _process(logits, rows, logits_processors).max(dim=-1)
    return best, index.int() + vocab_start


@on_gpu("sample_full")
def sample_full(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    vocab_start: int = 0,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample from the softmax of each row, or of a rank's shard of it: the rank with the largest score wins.

    Args:
        logits: [N, V] float32.
        temperature: [M] float32; 0: greedy, and the score is the logit.
        keys: [M, 2] int32, from random_keys.
        vocab_start: token id of the first column.
        rows: [M] int64, selected rows; None: all N.
        logits_processors: of all N rows; None: none.

    Returns:
        Scores [M] float32 and token ids [M] int32 of the sampled tokens; the lowest id wins a tie.
    """
    is_random = temperature > 0
    if cpu.supports_logits(logits):
        logits, masks = _process_but_masks(logits, rows, logits_processors)
        if is_random.all():
            return cpu.sample_full(logits, masks, temperature, keys, vocab_start)
        best, token_ids = cpu.sample_greedy(logits, masks, vocab_start)
        own = is_random.nonzero().squeeze(1)
        best[own], token_ids[own] = cpu.sample_full(
            logits[own], _masks_of(masks, own), temperature[own], keys[own], vocab_start
        )
        return best, token_ids
    logits = _process(logits, rows, logits_processors)
    token_ids = torch.arange(
        vocab_start, vocab_start + logits.shape[1], dtype=torch.int32, device=logits.device
    )
    noise = gumbel_noise(keys, token_ids.unsqueeze(0)).mul_(is_random.unsqueeze(1))
    best, index = noise.add_(logits / temperature.where(is_random, 1).unsqueeze(1)).max(dim=-1)
    return best, index.int() + vocab_start


@on_gpu("sample_top_k_top_p")
def sample_top_k_top_p(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> Tensor:
    """Sample from the softmax of each row after truncation.

    Args:
        logits: [N, V] float32, of the whole vocabulary.
        temperature: [M] float32, above 0.
        top_k: [M] int32 or int64, at least 1; V or more: off.
        top_p: [M] float64; 2: off.
        min_p: [M] float32; 0: off.
        keys: [M, 2] int32, from random_keys.
        rows: [M] int64, selected rows; None: all N.
        logits_processors: of all N rows; None: none.

    Returns:
        Token ids, [M] int32.
    """
    values = _process(logits, rows, logits_processors) / temperature.unsqueeze(1)
    values, token_ids = values.sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.int()
    keep = truncation_mask(values, log_sum_exp(values), logits.shape[1], top_k, top_p, min_p)
    return sample_masked(values, token_ids, keep, keys)


@on_gpu("topk_tokens")
def topk_tokens(
    logits: Tensor,
    num_top: int,
    temperature: Tensor | None = None,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest values of each row, or of a rank's shard of it, and the log of the softmax denominator.

    Args:
        logits: [N, V] float32.
        num_top: K, at most V.
        temperature: [M] float32, above 0; None: 1.
        rows: [M] int64, selected rows; None: all N.
        logits_processors: of all N rows; None: none.

    Returns:
        Values [M, K] float32, largest first; their columns [M, K] int32, ties in any order; and [M] float32, the
        logsumexp of the whole row.
    """
    values = _process(logits, rows, logits_processors)
    if temperature is not None:
        values = values / temperature.unsqueeze(1)
    top, columns = values.topk(num_top, dim=-1)
    return top, columns.int(), log_sum_exp(values)


def log_sum_exp(values: Tensor) -> Tensor:
    """Return the log of the sum of exponentials of each row, [N, V] float32 -> [N].

    On a CPU it does not depend on the number of rows; PyTorch divides the sum of a single row among threads.
    """
    return cpu.log_sum_exp(values) if cpu.supports_logits(values) else values.logsumexp(dim=-1)


def _process(logits: Tensor, rows: Tensor | None, logits_processors: LogitsProcessors | None) -> Tensor:
    """Apply the logits processors and select `rows`, or all rows if that is None."""
    if logits_processors is not None:
        logits = apply_logits_processors(logits, logits_processors)
    return logits if rows is None else logits[rows]


def _process_but_masks(
    logits: Tensor, rows: Tensor | None, logits_processors: LogitsProcessors | None
) -> tuple[Tensor, Masks | None]:
    """Return the rows as `_process` does, except that masks alone are returned, for the op to apply as it reads."""
    if logits_processors is None or not _are_masks_of_all_columns(logits, logits_processors):
        return _process(logits, rows, logits_processors), None
    masks = logits_processors.masks
    return (logits, masks) if rows is None else (logits[rows], _masks_of(masks, rows))


def _are_masks_of_all_columns(logits: Tensor, logits_processors: LogitsProcessors) -> bool:
    return logits_processors.num_tokens == logits.shape[1] and logits_processors.has_only_masks


def _masks_of(masks: Masks | None, rows: Tensor) -> Masks | None:
    return None if masks is None else masks._replace(slots=masks.slots[rows])


def truncation_mask(
    values: Tensor, log_total: Tensor, vocab_size: int, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return which of the most likely tokens truncation keeps.

    Args:
        values: [N, K] float32, logits over temperature, largest first.
        log_total: [N], logsumexp of the values over the whole vocabulary.

    Returns:
        [N, K] bool; always True in the first column.
    """
    top_k, log_total = top_k.unsqueeze(1), log_total.unsqueeze(1)
    in_top_k = torch.arange(values.shape[1], device=values.device) < top_k
    of_top_k = log_sum_exp(values.masked_fill(~in_top_k, -torch.inf)).unsqueeze(1)
    probabilities = (values - torch.where(top_k < vocab_size, of_top_k, log_total)).double().exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = in_top_k & (before < top_p.unsqueeze(1)) & (values >= values[:, :1] + min_p.log().unsqueeze(1))
    keep &= values > -torch.inf
    keep[:, 0] = True
    return keep


def sample_masked(values: Tensor, token_ids: Tensor, keep: Tensor, keys: Tensor) -> Tensor:
    """Sample from the softmax of the kept tokens. Returns token ids, [N] int32.

    Args:
        values: [N, K] float32, logits over temperature.
        token_ids: [N, K] int32.
        keep: [N, K] bool.
        keys: [N, 2] int32.
    """
    scores = gumbel_noise(keys, token_ids).add_(values).masked_fill_(~keep, -torch.inf)
    return token_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
