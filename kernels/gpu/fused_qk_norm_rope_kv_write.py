"""QK norm, rotary embedding, quantization and cache write in one launch; each number is read and written once."""

import triton
import triton.language as tl
from torch import Tensor

from .. import quantized_kv
from .quantized_kv import as_stored, narrow

# Heads per program.
BLOCK_HEADS = 8


@triton.jit
def _fused_qk_norm_rope_kv_write(
    heads_ptr,  # [T, Hq + 2 Hkv, D]
    cache_ptr,  # [N, 2, Hkv, B, D]
    scales_ptr,  # [N, 2, Hkv, B]
    fixed_scales_ptr,  # [2]
    slots_ptr,  # [T]
    cos_ptr,  # [T, R]
    sin_ptr,  # [T, R]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    eps,
    num_q_heads,
    num_kv_heads,
    stride_heads,
    stride_cos,
    stride_sin,
    stride_cache_block,
    stride_cache_kv,
    stride_cache_head,
    HEAD_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    MIN_MAGNITUDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    # grid: (T, tiles of heads)
    # A head consists of the two halves of the rotated dimensions and a rest, which may be empty.
    HALF: tl.constexpr = ROTATED_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = offs_h < num_q_heads + 2 * num_kv_heads
    is_q = offs_h < num_q_heads
    is_v = offs_h >= num_q_heads + num_kv_heads
    head_ptrs = heads_ptr + token * stride_heads + offs_h[:, None] * HEAD_DIM
    offs_d = tl.arange(0, BLOCK_D)
    offs_rest = ROTATED_DIM + tl.arange(0, BLOCK_REST)
    mask_d = offs_d < HALF
    mask_rest = offs_rest < HEAD_DIM
    mask = is_head[:, None] & mask_d[None, :]
    low = tl.load(head_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(head_ptrs + HALF + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = tl.load(head_ptrs + offs_rest[None, :], mask=is_head[:, None] & mask_rest[None, :], other=0.0)
    rest = rest.to(tl.float32)

    if q_norm_ptr is not None:
        squares = tl.sum(low * low + high * high, 1) + tl.sum(rest * rest, 1)
        factor = tl.where(is_v, 1.0, 1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        low *= factor * _norm_weights(q_norm_ptr, k_norm_ptr, offs_d, mask_d, is_q, is_v)
        high *= factor * _norm_weights(q_norm_ptr, k_norm_ptr, HALF + offs_d, mask_d, is_q, is_v)
        rest *= factor * _norm_weights(q_norm_ptr, k_norm_ptr, offs_rest, mask_rest, is_q, is_v)
    if cos_ptr is not None:
        # The sines of the first half are negated (see kernels.rope); those of the second half are used.
        cos = tl.load(cos_ptr + token * stride_cos + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * stride_sin + HALF + offs_d, mask=mask_d, other=0.0)
        sin = sin.to(tl.float32)[None, :]
        new_low = low * cos - high * sin
        new_high = high * cos + low * sin
        low = tl.where(is_v[:, None], low, new_low)
        high = tl.where(is_v[:, None], high, new_high)

    tl.store(head_ptrs + offs_d[None, :], low, mask=is_q[:, None] & mask_d[None, :])
    tl.store(head_ptrs + HALF + offs_d[None, :], high, mask=is_q[:, None] & mask_d[None, :])
    tl.store(head_ptrs + offs_rest[None, :], rest, mask=is_q[:, None] & mask_rest[None, :])
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    is_kv = is_head & (offs_h >= num_q_heads)
    kv_heads = tl.where(is_v, offs_h - num_kv_heads, offs_h) - num_q_heads
    rows = kv_heads * stride_cache_head + tl.where(is_v, stride_cache_kv, 0)
    rows += slot // CACHE_BLOCK * stride_cache_block + slot % CACHE_BLOCK * HEAD_DIM
    DTYPE: tl.constexpr = cache_ptr.dtype.element_ty
    if scales_ptr is not None:
        if fixed_scales_ptr is not None:
            scales = tl.where(is_v, tl.load(fixed_scales_ptr + 1), tl.load(fixed_scales_ptr))
        else:
            magnitude = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
            magnitude = tl.maximum(magnitude, tl.max(tl.abs(rest), 1))
            scales = tl.maximum(magnitude, MIN_MAGNITUDE) / LIMIT
        tl.store(scales_ptr + rows // HEAD_DIM, scales, mask=is_kv)
        low = narrow(low / scales[:, None], LIMIT, DTYPE)
        high = narrow(high / scales[:, None], LIMIT, DTYPE)
        rest = narrow(rest / scales[:, None], LIMIT, DTYPE)
    cache_ptrs = cache_ptr + rows[:, None]
    tl.store(cache_ptrs + offs_d[None, :], low, mask=is_kv[:, None] & mask_d[None, :])
    tl.store(cache_ptrs + HALF + offs_d[None, :], high, mask=is_kv[:, None] & mask_d[None, :])
    tl.store(cache_ptrs + offs_rest[None, :], rest, mask=is_kv[:, None] & mask_rest[None, :])


@triton.jit
def _norm_weights(q_norm_ptr, k_norm_ptr, offs_d, mask_d, is_q, is_v):
    """Load the norm weights of each head, [BLOCK_H, D]: those of queries, those of keys, and 1 for values."""
    q_weights = tl.load(q_norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    k_weights = tl.load(k_norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    weights = tl.where(is_q[:, None], q_weights[None, :], k_weights[None, :])
    return tl.where(is_v[:, None], 1.0, weights)


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
    """See kernels.fused_qk_norm_rope_kv_write; tokens with negative slots are not stored."""
    num_tokens, num_heads, head_dim = heads.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_q_heads = num_heads - 2 * num_kv_heads
    rotated_dim, stride_cos, stride_sin = head_dim, 0, 0
    if cos is not None and sin is not None:
        assert cos.stride(1) == sin.stride(1) == 1
        rotated_dim, stride_cos, stride_sin = cos.shape[1], cos.stride(0), sin.stride(0)
    assert rotated_dim % 2 == 0
    assert heads.stride()[1:] == (head_dim, 1)
    assert kv_cache.stride()[3:] == (head_dim, 1)
    assert kv_scales is None or (kv_scales.is_contiguous() and kv_cache.is_contiguous())
    assert (q_norm is None) == (k_norm is None)
    assert (cos is None) == (sin is None)
    _fused_qk_norm_rope_kv_write[(num_tokens, triton.cdiv(num_heads, BLOCK_HEADS))](
        heads, as_stored(kv_cache), kv_scales, fixed_scales, slot_mapping, cos, sin, q_norm, k_norm, eps, num_q_heads,
        num_kv_heads, heads.stride(0), stride_cos, stride_sin, *kv_cache.stride()[:3],
        HEAD_DIM=head_dim, ROTATED_DIM=rotated_dim, CACHE_BLOCK=block_size,
        LIMIT=quantized_kv.LIMITS.get(kv_cache.dtype), MIN_MAGNITUDE=quantized_kv.MIN_MAGNITUDE,
        BLOCK_H=BLOCK_HEADS, BLOCK_D=triton.next_power_of_2(rotated_dim // 2),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotated_dim)), num_warps=4,
    )  # fmt: skip
    return heads[:, :num_q_heads]
