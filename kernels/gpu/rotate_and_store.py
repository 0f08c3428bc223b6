"""Norm, rotation and cache write of a step's heads in one launch, each number read and written once."""

import triton
import triton.language as tl
from torch import Tensor

# Heads a program.
BLOCK_HEADS = 8


@triton.jit
def _rotate_and_store(
    heads_ptr,  # [T, Hq + 2 Hkv, D]
    cache_ptr,  # [N, 2, Hkv, B, D]
    slots_ptr,  # [T]
    cos_ptr,  # [T, D]
    sin_ptr,  # [T, D]
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
    CACHE_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (T, tiles of heads)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HALF
    is_q = offs_h < num_q_heads
    is_v = offs_h >= num_q_heads + num_kv_heads
    mask = (offs_h < num_q_heads + 2 * num_kv_heads)[:, None] & mask_d[None, :]
    low_ptrs = heads_ptr + token * stride_heads + offs_h[:, None] * HEAD_DIM + offs_d[None, :]
    low = tl.load(low_ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(low_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)

    scaled_low, scaled_high = low, high
    if HAS_NORM:
        mean_square = tl.sum(low * low + high * high, 1) / HEAD_DIM
        factor = 1.0 / tl.sqrt(mean_square + eps)
        q_low = tl.load(q_norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        scaled_low = low * factor[:, None] * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        scaled_high = high * factor[:, None] * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
    # The sines of the first half are negative, as kernels.rope wants them; those of the second are used.
    cos = tl.load(cos_ptr + token * stride_cos + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_sin + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    new_low = tl.where(is_v[:, None], low, scaled_low * cos[None, :] - scaled_high * sin[None, :])
    new_high = tl.where(is_v[:, None], high, scaled_high * cos[None, :] + scaled_low * sin[None, :])

    mask_q = mask & is_q[:, None]
    tl.store(low_ptrs, new_low, mask=mask_q)
    tl.store(low_ptrs + HALF, new_high, mask=mask_q)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    kv_heads = tl.where(is_v, offs_h - num_kv_heads, offs_h) - num_q_heads
    rows = kv_heads * stride_cache_head + tl.where(is_v, stride_cache_kv, 0)
    slot_ptr = cache_ptr + slot // CACHE_BLOCK * stride_cache_block + slot % CACHE_BLOCK * HEAD_DIM
    cache_ptrs = slot_ptr + rows[:, None] + offs_d[None, :]
    mask_kv = mask & (offs_h >= num_q_heads)[:, None]
    tl.store(cache_ptrs, new_low, mask=mask_kv)
    tl.store(cache_ptrs + HALF, new_high, mask=mask_kv)


def rotate_and_store(
    heads: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See kernels.rotate_and_store; tokens with slots below 0 are stored nowhere."""
    num_tokens, num_heads, head_dim = heads.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_q_heads = num_heads - 2 * num_kv_heads
    assert heads.stride()[1:] == (head_dim, 1)
    assert kv_cache.stride()[3:] == (head_dim, 1)
    assert cos.stride(1) == sin.stride(1) == 1
    assert (q_norm is None) == (k_norm is None)
    _rotate_and_store[(num_tokens, triton.cdiv(num_heads, BLOCK_HEADS))](
        heads, kv_cache, slot_mapping, cos, sin, q_norm, k_norm, eps, num_q_heads, num_kv_heads,
        heads.stride(0), cos.stride(0), sin.stride(0), *kv_cache.stride()[:3],
        HEAD_DIM=head_dim, CACHE_BLOCK=block_size, HAS_NORM=q_norm is not None,
        BLOCK_H=BLOCK_HEADS, BLOCK_D=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip
    return heads[:, :num_q_heads]
