"""Tokens from logits: the likeliest, or drawn among all or among what top_k, top_p and min_p leave.

A draw takes the largest sum of a value, which is a logit over the temperature, and its token's Gumbel noise
(kernels.gumbel). The cuts apply in the order top_k, top_p, min_p, and each leaves a prefix of the tokens sorted by
likelihood, equals by id; top_p counts within what top_k leaves.

Ops take logits as the model made them and what is to be done about them first, as kernels.logits describes it;
`rows` says which of them are meant, and all other arguments and results have one entry for each of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import on_gpu
from .gumbel import gumbel_noise
from .logits import LogitsProcessors, apply_logits_processors
from .native import ops as cpu


@on_gpu("sample_full")
def sample_greedy(
    logits: Tensor,
    vocab_start: int = 0,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, or of a rank's part of it.

    Args:
        logits: [N, V] float32.
        vocab_start: the token of the first column.
        rows: [M] int64; None: all N.
        logits_processors: of all N rows; None: nothing.

    Returns:
        Logits [M] float32 and token ids [M] int32, the first of equals.
    """
    logits = _of_rows(logits, rows, logits_processors)
    if cpu.supports_logits(logits):
        return cpu.sample_greedy(logits, vocab_start)
    best, index = logits.max(dim=-1)
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
    """Draws from the softmax of each row, or from a rank's part of it: the largest of the ranks' scores wins.

    Args:
        logits: [N, V] float32.
        temperature: [M] float32; 0 takes the likeliest, whose score is its logit.
        keys: [M, 2] int32, from random_keys.
        vocab_start: the token of the first column.
        rows: [M] int64; None: all N.
        logits_processors: of all N rows; None: nothing.

    Returns:
        Scores [M] float32 and token ids [M] int32 of the winners, the first of equals.
    """
    logits = _of_rows(logits, rows, logits_processors)
    is_drawn = temperature > 0
    if cpu.supports_logits(logits):
        if is_drawn.all():
            return cpu.sample_full(logits, temperature, keys, vocab_start)
        best, token_ids = cpu.sample_greedy(logits, vocab_start)
        drawn = is_drawn.nonzero().squeeze(1)
        best[drawn], token_ids[drawn] = cpu.sample_full(
            logits[drawn], temperature[drawn], keys[drawn], vocab_start
        )
        return best, token_ids
    token_ids = torch.arange(
        vocab_start, vocab_start + logits.shape[1], dtype=torch.int32, device=logits.device
    )
    noise = gumbel_noise(keys, token_ids.unsqueeze(0)).mul_(is_drawn.unsqueeze(1))
    best, index = noise.add_(logits / temperature.where(is_drawn, 1).unsqueeze(1)).max(dim=-1)
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
    """Draws from what the cuts leave of the softmax of each row.

    Args:
        logits: [N, V] float32, of the whole vocabulary.
        temperature: [M] float32, above 0.
        top_k: [M] int32 or int64, from 1; V or more for no cut.
        top_p: [M] float64; 2 for no cut.
        min_p: [M] float32; 0 for no cut.
        keys: [M, 2] int32, from random_keys.
        rows: [M] int64; None: all N.
        logits_processors: of all N rows; None: nothing.

    Returns:
        Token ids, [M] int32.
    """
    values = _of_rows(logits, rows, logits_processors) / temperature.unsqueeze(1)
    values, token_ids = values.sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.int()
    keep = truncation_mask(values, values.logsumexp(-1), logits.shape[1], top_k, top_p, min_p)
    return sample_masked(values, token_ids, keep, keys)


@on_gpu("topk_tokens")
def topk_tokens(
    logits: Tensor,
    num_top: int,
    temperature: Tensor | None = None,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest values of each row, or of a rank's part of it, and the sum over all.

    Args:
        logits: [N, V] float32.
        num_top: K, at most V; at most kernels.gpu.topk_candidates.MAX_CANDIDATES on a GPU.
        temperature: [M] float32, above 0; None: 1.
        rows: [M] int64; None: all N.
        logits_processors: of all N rows; None: nothing.

    Returns:
        Values [M, K] float32, largest first; their columns [M, K] int32, of equals any; and [M] float32, the log of
        the sum of exp over the whole row.
    """
    values = _of_rows(logits, rows, logits_processors)
    if temperature is not None:
        values = values / temperature.unsqueeze(1)
    top, columns = values.topk(num_top, dim=-1)
    return top, columns.int(), values.logsumexp(dim=-1)


def _of_rows(logits: Tensor, rows: Tensor | None, logits_processors: LogitsProcessors | None) -> Tensor:
    """What the model's logits of those rows, of all without `rows`, become."""
    if logits_processors is not None:
        logits = apply_logits_processors(logits, logits_processors)
    return logits if rows is None else logits[rows]


def truncation_mask(
    values: Tensor, log_total: Tensor, vocab_size: int, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Which of the likeliest tokens the cuts leave.

    Args:
        values: [N, K] float32, logits over temperature, largest first.
        log_total: [N], log of the sum of exp over the whole vocabulary.

    Returns:
        [N, K] bool; at least the first of each row.
    """
    top_k, log_total = top_k.unsqueeze(1), log_total.unsqueeze(1)
    in_top_k = torch.arange(values.shape[1], device=values.device) < top_k
    of_top_k = values.masked_fill(~in_top_k, -torch.inf).logsumexp(dim=-1, keepdim=True)
    probabilities = (values - torch.where(top_k < vocab_size, of_top_k, log_total)).double().exp()
    likelier = probabilities.cumsum(dim=-1) - probabilities
    keep = in_top_k & (likelier < top_p.unsqueeze(1)) & (values >= values[:, :1] + min_p.log().unsqueeze(1))
    keep &= values > -torch.inf
    keep[:, 0] = True
    return keep


def sample_masked(values: Tensor, token_ids: Tensor, keep: Tensor, keys: Tensor) -> Tensor:
    """Draws from the softmax of the kept: token ids, [N] int32.

    Args:
        values: [N, K] float32, logits over temperature.
        token_ids: [N, K] int32.
        keep: [N, K] bool.
        keys: [N, 2] int32.
    """
    scores = gumbel_noise(keys, token_ids).add_(values).masked_fill_(~keep, -torch.inf)
    return token_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
