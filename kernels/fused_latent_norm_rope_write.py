"""Norm, rotary embedding and cache write of latent attention, and rotation of its queries, as one op."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import on_gpu
from .norm import rms_norm
from .paged_cache import write_kv
from .rope import apply_rope


@on_gpu("fused_latent_norm_rope_write")
def fused_latent_norm_rope_write(
    q: Tensor,
    projected: Tensor,
    latents: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    eps: float,
    interleaved: bool,
    scales: Tensor | None = None,
    index_keys: Tensor | None = None,
) -> None:
    """Rotate queries, and write the latents of tokens to the cache.

    Args:
        q: [T, Hq, N + R]; the last R numbers of each head are rotated in place.
        projected: [T, C + R], latents before the norm, and shared keys before the rotation; may be overwritten.
        latents: [N, 1, 1, B, C + R + I], the cache.
        slot_mapping: [T] int64, as for write_kv.
        cos, sin: [T, R], as for apply_rope; R may be 0.
        norm: [C], weight of the RMSNorm of the latents.
        eps: of the norm.
        interleaved: numbers 2 i and 2 i + 1 are a pair; they are stored as i and i + R / 2. Otherwise i and i + R / 2
            are a pair.
        scales: [N, 1, 1, B] float32, written if the cache is quantized; otherwise None.
        index_keys: [T, I], stored behind the latents (see kernels.sparse_latent); None if I is 0.
    """
    latent_dim = norm.shape[0]
    shared = projected[:, latent_dim:].unsqueeze(1)
    for heads in (q, shared):
        rotate_last(heads, cos, sin, interleaved)
    normed = rms_norm(projected[:, :latent_dim], norm, eps)
    parts = [normed, projected[:, latent_dim:], *([] if index_keys is None else [index_keys])]
    write_kv(torch.cat(parts, dim=1)[:, None, None], latents, slot_mapping, scales)


def rotate_last(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate the last R numbers of each head in place, as fused_latent_norm_rope_write does, [T, H, D]."""
    if not cos.shape[1]:
        return
    rotated = heads[..., -cos.shape[1] :]
    if interleaved:
        rotated.copy_(rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
    apply_rope(rotated, cos, sin)
