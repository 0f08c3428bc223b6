"""Norm and rotary embedding of queries and keys, and the write of keys and values to the paged cache, as one op."""

from __future__ import annotations

from torch import Tensor

from .dispatch import on_gpu
from .norm import rms_norm
from .paged_cache import write_kv
from .rope import apply_rope


@on_gpu("fused_qk_norm_rope_kv_write")
def fused_qk_norm_rope_kv_write(
    heads: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
    fixed_scales: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate queries and keys, and write keys and values to the cache.

    Args:
        heads: [T, Hq + 2 Hkv, D], projected queries, keys and values; overwritten.
        kv_cache: [N, 2, Hkv, B, D].
        slot_mapping: [T] int64, as for write_kv.
        cos, sin: [T, R], as for apply_rope; both None: no rotary embedding.
        q_norm, k_norm: [D], weights of the RMSNorm over each head, before the rotation; both or neither.
        eps: of the norms.
        kv_scales: [N, 2, Hkv, B] float32, written if the cache is quantized; otherwise None.
        fixed_scales: as for write_kv.

    Returns:
        The queries, [T, Hq, D], a view of `heads`.
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads = kv_cache.shape[2]
    q, k, _ = heads.split_with_sizes([num_heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
        k.copy_(rms_norm(k, k_norm, eps))
    if cos is not None and sin is not None:
        apply_rope(heads[:, :-num_kv_heads], cos, sin)
    kv = heads[:, -2 * num_kv_heads :].view(num_tokens, 2, num_kv_heads, head_dim)
    write_kv(kv, kv_cache, slot_mapping, kv_scales, fixed_scales)
    return q
