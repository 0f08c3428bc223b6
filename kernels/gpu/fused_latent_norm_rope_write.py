"""Latent norm, rotary embeddings and cache write in one launch; each number is read and written once."""

import triton
import triton.language as tl
from torch import Tensor

from .. import quantized_kv
from .quantized_kv import as_stored, narrow

# Heads per program.
BLOCK_HEADS = 8


@triton.jit
def _rotate(low, high, cos_ptr, sin_ptr, offs_i, mask, HALF: tl.constexpr):
    """Rotate pairs. The sines of the first half are negated (see kernels.rope); those of the second half are used."""
    cos = tl.load(cos_ptr + offs_i, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + HALF + offs_i, mask=mask, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _fused_latent_norm_rope_write(
    q_ptr,  # [T, Hq, N + R]
    projected_ptr,  # [T, C + R]
    index_keys_ptr,  # [T, I]
    cache_ptr,  # [N, 1, 1, B, C + R + I]
    scales_ptr,  # [N, 1, 1, B]
    slots_ptr,  # [T]
    cos_ptr,  # [T, R]
    sin_ptr,  # [T, R]
    norm_ptr,  # [C]
    eps,
    num_heads,
    stride_q_token,
    stride_q_head,
    stride_projected,
    stride_index_keys,
    stride_cos,
    stride_sin,
    KEY_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    SHARED_DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    MIN_MAGNITUDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    # grid: (T, 1 + tiles of Hq)
    # Tile 0 is the latent; the others rotate heads of the queries.
    HALF: tl.constexpr = SHARED_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    offs_i = tl.arange(0, BLOCK_I)
    mask_i = offs_i < HALF
    # Places of a pair's numbers.
    offs_low = 2 * offs_i if INTERLEAVED else offs_i
    offs_high = 2 * offs_i + 1 if INTERLEAVED else HALF + offs_i
    cos_ptr += token * stride_cos
    sin_ptr += token * stride_sin
    if tl.program_id(1) > 0:
        offs_h = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (offs_h < num_heads)[:, None] & mask_i[None, :]
        head_ptrs = q_ptr + token * stride_q_token + offs_h[:, None] * stride_q_head + KEY_DIM
        low = tl.load(head_ptrs + offs_low[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(head_ptrs + offs_high[None, :], mask=mask, other=0.0).to(tl.float32)
        # All pairs are read before any is overwritten by another thread.
        tl.debug_barrier()
        low, high = _rotate(low, high, cos_ptr, sin_ptr, offs_i[None, :], mask_i[None, :], HALF)
        tl.store(head_ptrs + offs_i[None, :], low, mask=mask)
        tl.store(head_ptrs + HALF + offs_i[None, :], high, mask=mask)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < LATENT_DIM
    row_ptr = projected_ptr + token * stride_projected
    latent = tl.load(row_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    latent *= weight / tl.sqrt(tl.sum(latent * latent, 0) / LATENT_DIM + eps)
    low = tl.load(row_ptr + LATENT_DIM + offs_low, mask=mask_i, other=0.0).to(tl.float32)
    high = tl.load(row_ptr + LATENT_DIM + offs_high, mask=mask_i, other=0.0).to(tl.float32)
    low, high = _rotate(low, high, cos_ptr, sin_ptr, offs_i, mask_i, HALF)
    if index_keys_ptr is not None:
        offs_x = tl.arange(0, BLOCK_X)
        mask_x = offs_x < INDEX_DIM
        index_key_ptrs = index_keys_ptr + token * stride_index_keys + offs_x
        index_key = tl.load(index_key_ptrs, mask=mask_x, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = cache_ptr.dtype.element_ty
    if scales_ptr is not None:
        magnitude = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
        if index_keys_ptr is not None:
            magnitude = tl.maximum(magnitude, tl.max(tl.abs(index_key), 0))
        scale = tl.maximum(tl.maximum(magnitude, tl.max(tl.abs(latent), 0)), MIN_MAGNITUDE) / LIMIT
        tl.store(scales_ptr + slot, scale)
        latent = narrow(latent / scale, LIMIT, DTYPE)
        low = narrow(low / scale, LIMIT, DTYPE)
        high = narrow(high / scale, LIMIT, DTYPE)
        if index_keys_ptr is not None:
            index_key = narrow(index_key / scale, LIMIT, DTYPE)
    slot_ptr = cache_ptr + slot * (LATENT_DIM + SHARED_DIM + INDEX_DIM)
    tl.store(slot_ptr + offs_c, latent, mask=mask_c)
    tl.store(slot_ptr + LATENT_DIM + offs_i, low, mask=mask_i)
    tl.store(slot_ptr + LATENT_DIM + HALF + offs_i, high, mask=mask_i)
    if index_keys_ptr is not None:
        tl.store(slot_ptr + LATENT_DIM + SHARED_DIM + offs_x, index_key, mask=mask_x)


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
    """See kernels.fused_latent_norm_rope_write; tokens with negative slots are not stored."""
    (num_tokens, num_heads, qk_head_dim), qk_rope_head_dim = q.shape, cos.shape[1]
    latent_dim = norm.shape[0]
    index_dim = 0 if index_keys is None else index_keys.shape[1]
    assert q.stride(2) == projected.stride(1) == cos.stride(1) == sin.stride(1) == 1
    assert latents.is_contiguous()
    assert latents.shape[-1] == latent_dim + qk_rope_head_dim + index_dim
    assert index_keys is None or index_keys.stride(1) == 1
    assert scales is None or scales.is_contiguous()
    assert qk_rope_head_dim % 2 == 0
    _fused_latent_norm_rope_write[(num_tokens, 1 + triton.cdiv(num_heads, BLOCK_HEADS))](
        q, projected, index_keys, as_stored(latents), scales, slot_mapping, cos, sin, norm, eps, num_heads,
        q.stride(0), q.stride(1), projected.stride(0), 0 if index_keys is None else index_keys.stride(0),
        cos.stride(0), sin.stride(0),
        KEY_DIM=qk_head_dim - qk_rope_head_dim, SHARED_DIM=qk_rope_head_dim,
        LATENT_DIM=latent_dim, INDEX_DIM=index_dim,
        INTERLEAVED=interleaved, LIMIT=quantized_kv.LIMITS.get(latents.dtype),
        MIN_MAGNITUDE=quantized_kv.MIN_MAGNITUDE, BLOCK_H=BLOCK_HEADS, BLOCK_C=triton.next_power_of_2(latent_dim),
        BLOCK_I=triton.next_power_of_2(max(qk_rope_head_dim // 2, 1)),
        BLOCK_X=triton.next_power_of_2(max(index_dim, 1)), num_warps=4,
    )  # fmt: skip
