"""Sparse latent attention on the kernel of dense decoding: each slot is a block of one token."""

from torch import Tensor

from ..decode_splits import INVARIANT_ITEM_LEN, split_decodes
from .latent_decode import latent_decode_attention


def sparse_latent_attention(
    q: Tensor,
    latents: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    value_dim: int,
    scales: Tensor | None = None,
) -> Tensor:
    """See kernels.sparse_latent; the output of padding rows is 0."""
    tokens = latents.flatten(0, 3)[:, None, None, None]
    token_scales = None if scales is None else scales.view(-1, 1, 1, 1)
    # Few tokens are attended to, so items of one length, which no batch changes, cost little.
    splits = split_decodes(counts, slots.shape[1], INVARIANT_ITEM_LEN)
    return latent_decode_attention(q, tokens, slots, counts, scale, value_dim, splits, token_scales)
