"""Attention of all heads to the same vectors, with sinks, and the windows of tokens that entries are computed from.

DeepSeek-V4 (2026) caches a token as one vector, which is the key and the value of all heads. The ops here are written
in PyTorch alone, for every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_runs import StateRuns

# Scores in float32 at a time, except that those of one query are never divided.
SCORE_BYTES = 64 << 20


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Return x with its last R elements rotated, of which 2 i and 2 i + 1 are a pair.

    Args:
        x: [T, H, D].
        cos, sin: [T, R], in the layout of kernels.rope: the sines of the first half are negative.
        back: rotate by the negative angles.
    """
    half = cos.shape[1] // 2
    cosines, sines = cos[:, None, half:].float(), sin[:, None, half:].float()
    if back:
        sines = -sines
    first, second = x[..., -2 * half :].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return torch.cat((x[..., : -2 * half], rotated.flatten(-2).to(x.dtype)), dim=-1)


def token_windows(x: Tensor, ends: Tensor, states: Tensor, runs: StateRuns, *, dilation: int = 1) -> Tensor:
    """Return the inputs of the last K tokens up to each of some, [n, K, C]; zeros before a sequence begins.

    Args:
        x: [T, C], the inputs of a step's tokens.
        ends: [n] int64, the last token of each window; those behind all runs have windows of some tokens.
        states: [N, (K - 1) dilation, C], the inputs of the last tokens of each sequence; overwritten.
        dilation: distance of the tokens of a window.
    """
    num_runs, num_kept = len(runs.slots), states.shape[1]
    before = states[runs.slots.long()]
    before = before.masked_fill(runs.is_new[:num_runs, None, None], 0)
    # The inputs before the step, of one run after the other, and then those of the step.
    every = torch.cat((before.flatten(0, 1), x))
    back = torch.arange(-num_kept, 1, device=x.device)
    starts = runs.starts[:num_runs].long()

    def inputs_up_to(last: Tensor, own: Tensor, back: Tensor) -> Tensor:
        """Return the inputs of the tokens `back` from `last` in the runs `own`."""
        tokens = last[:, None] + back
        kept = (own * num_kept + num_kept)[:, None] + tokens - starts[own, None]
        is_before = tokens < starts[own, None]
        return every[torch.where(is_before, kept.clamp(min=0), num_runs * num_kept + tokens)]

    of_ends = torch.searchsorted(runs.starts[1 : num_runs + 1], ends.int(), right=True)
    of_ends = of_ends.clamp(max=num_runs - 1)  # padding is of the last run
    found = inputs_up_to(ends, of_ends, back[::dilation])
    own = torch.arange(num_runs, device=x.device)
    after = inputs_up_to(runs.ends[:num_runs].long() - 1, own, back[1:])
    if runs.stores is not None:
        after = torch.where(runs.stores[:num_runs, None, None], after, states[runs.slots.long()])
    states[runs.slots.long()] = after
    return found


def shared_attention(
    q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor | None, scale: float, value_dim: int
) -> Tensor:
    """Compute the attention of queries to the keys of their group, whose first elements are the values.

    Args:
        q: [G, T, H, D].
        keys: [G, L, D], the same for all heads; those that no query attends to may be anything, NaN too.
        visible: [G, T, L] bool, the keys that each query attends to.
        sinks: [H], the logit of one more key of each head, whose value is 0; None for none.
        value_dim: V.

    Returns:
        [G, T, H, V]; zeros for queries that attend to nothing.
    """
    out = q.new_empty(*q.shape[:3], value_dim)
    wide = keys.float().masked_fill(~visible.any(dim=1).unsqueeze(-1), 0)
    num_tile = max(1, SCORE_BYTES // (4 * q.shape[0] * q.shape[2] * max(1, keys.shape[1])))
    for start in range(0, q.shape[1], num_tile):
        own = slice(start, start + num_tile)
        scores = torch.einsum("gthd,gld->gthl", q[:, own].float(), wide) * scale
        scores = scores.masked_fill(~visible[:, own, None], -torch.inf)
        if sinks is not None:
            extra = sinks.float()[None, None, :, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = scores.softmax(dim=-1).nan_to_num_(0.0)[..., : keys.shape[1]]
        out[:, own] = torch.einsum("gthl,gld->gthd", weights, wide[..., :value_dim]).to(q.dtype)
    return out


def gather_tokens(latents: Tensor, block_tables: Tensor, positions: Tensor) -> Tensor:
    """Return the cached vectors of tokens, [S, L, D]; those of negative positions are of some token.

    Args:
        latents: [N, 1, 1, B, D].
        block_tables: [S, M] int32.
        positions: [S, L] int64.
    """
    block_size, positions = latents.shape[3], positions.clamp(min=0)
    blocks = block_tables.long().gather(1, positions // block_size)
    return latents[blocks, 0, 0, positions % block_size]


def gather_entries(entries: Tensor, block_tables: Tensor, count: int, rate: int, block_size: int) -> Tensor:
    """Return the first `count` entries of sequences, [S, count, D].

    Args:
        entries: [N, E, D], those of each block: of windows of `rate` tokens whose last token is in it.
        block_tables: [S, M] int32.
    """
    index = torch.arange(count, device=entries.device)
    block, place = entry_places(index, rate, block_size)
    return entries[block_tables.long()[:, block], place]


def entry_places(index: Tensor, rate: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the block of each entry among those of its sequence, and its place in the block, [n] int64 each."""
    block = ((index + 1) * rate - 1) // block_size
    return block, index - block * block_size // rate


def choose_entries(q: Tensor, weights: Tensor, keys: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """Return the entries that queries attend to: those with the best scores, of equal scores the earlier ones.

    The score of an entry is the sum of the heads' rectified products, each multiplied by a weight of the query.

    Args:
        q: [G, T, Hi, I], rotated.
        weights: [G, T, Hi] float32.
        keys: [G, L, I].
        counts: [G, T], entries that a query may attend to.

    Returns:
        [G, T, L] bool.
    """
    num_keys = keys.shape[1]
    visible = torch.arange(num_keys, device=keys.device) < counts.unsqueeze(-1)
    if num_keys <= top_k:
        return visible
    wide = keys.float()
    num_tile = max(1, SCORE_BYTES // (4 * q.shape[0] * q.shape[2] * num_keys))
    for start in range(0, q.shape[1], num_tile):
        own = slice(start, start + num_tile)
        products = torch.einsum("gthd,gld->gthl", q[:, own].float(), wide).relu_()
        scores = torch.einsum("gth,gthl->gtl", weights[:, own], products)
        scores = scores.masked_fill(~visible[:, own], -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        chosen = torch.zeros_like(visible[:, own]).scatter_(-1, best, True)
        visible[:, own] &= chosen
    return visible
