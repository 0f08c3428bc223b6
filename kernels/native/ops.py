"""Wrappers of the C++ ops: each checks, allocates and calls. What they compute is said at their PyTorch twins."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..attention_variant import AttentionVariant
from ..quantized_kv import LIMITS, MIN_MAGNITUDE
from .library import is_available, library

# Queries of these head_dims have an attention kernel (native/attention.cpp).
HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_DTYPES = {**DTYPES, torch.int8: 2, torch.float8_e4m3fn: 3}


@functools.cache
def simd_lanes() -> int:
    """Numbers of a vector register; no length that is not a multiple of it is taken. 0 without the library."""
    return int(library().quire_lanes()) if is_available() else 0


def supports(x: Tensor, length: int) -> bool:
    """Whether the ops compute on this tensor, in runs of `length` numbers."""
    return x.is_cpu and x.dtype in DTYPES and simd_lanes() > 0 and length % simd_lanes() == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., E] of at most three dimensions."""
    length = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    outer, inner = (1, x.shape[0]) if x.dim() == 2 else (x.shape[0], x.shape[1])
    strides = (0, x.stride(0)) if x.dim() == 2 else (x.stride(0), x.stride(1))
    library().quire_rms_norm(
        DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, *strides, inner * length,
        length, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, length = x.shape
    out = torch.empty_like(x)
    library().quire_add_rms_norm(
        DTYPES[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, length, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gate_and_mul(gate_up, 0)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gate_and_mul(gate_up, 1)


def _gate_and_mul(gate_up: Tensor, gate: int) -> Tensor:
    rows, length = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, length), dtype=gate_up.dtype)
    library().quire_gate_and_mul(
        DTYPES[gate_up.dtype], gate, gate_up.data_ptr(), out.data_ptr(), rows, length, torch.get_num_threads()
    )
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, head_dim = x.shape
    assert x.stride(1) == head_dim
    assert cos.stride() == sin.stride()
    library().quire_apply_rope(
        DTYPES[x.dtype], x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim, cos.shape[1],
        x.stride(0), cos.stride(0), torch.get_num_threads(),
    )  # fmt: skip


def write_kv(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    tokens, _, num_kv_heads, head_dim = kv.shape
    block_size = kv_cache.shape[3]
    assert kv_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    if kv_scales is None:
        assert kv.dtype == kv_cache.dtype
        library().quire_write_kv(
            kv.element_size(), kv.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(), tokens, kv.stride(0),
            2 * num_kv_heads, block_size, head_dim,
        )  # fmt: skip
        return
    assert kv_scales.is_contiguous()
    library().quire_write_kv_quantized(
        DTYPES[kv.dtype], kv_cache.dtype == torch.float8_e4m3fn, kv.data_ptr(), kv_cache.data_ptr(),
        kv_scales.data_ptr(), slot_mapping.data_ptr(), tokens, kv.stride(0), 2 * num_kv_heads, block_size, head_dim,
        LIMITS[kv_cache.dtype], MIN_MAGNITUDE,
    )  # fmt: skip


def supports_attention(q: Tensor, kv_cache: Tensor) -> bool:
    head_dim = q.shape[-1]
    return (
        supports(q, head_dim)
        and head_dim in HEAD_DIMS
        and kv_cache.dtype in CACHE_DTYPES
        and q.stride(1) == head_dim
    )


def paged_decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    variant: AttentionVariant,
    kv_scales: Tensor | None,
) -> Tensor:
    (num_seqs, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q.shape, kv_cache.shape
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype)
    library().quire_paged_decode(
        DTYPES[q.dtype], CACHE_DTYPES[kv_cache.dtype], q.data_ptr(), kv_cache.data_ptr(), address_of(kv_scales),
        block_tables.data_ptr(), seq_lens.data_ptr(), out.data_ptr(), num_seqs, num_heads, num_kv_heads, head_dim,
        block_size, block_tables.stride(0), q.stride(0), scale, *_variant_arguments(variant),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def paged_prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    variant: AttentionVariant,
    kv_scales: Tensor | None,
) -> Tensor:
    (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q.shape, kv_cache.shape
    assert block_tables.dtype == query_start.dtype == seq_lens.dtype == torch.int32
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    library().quire_paged_prefill(
        DTYPES[q.dtype], CACHE_DTYPES[kv_cache.dtype], q.data_ptr(), kv_cache.data_ptr(), address_of(kv_scales),
        block_tables.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(), out.data_ptr(), len(seq_lens),
        num_heads, num_kv_heads, head_dim, block_size, block_tables.stride(0), q.stride(0), scale,
        *_variant_arguments(variant), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _variant_arguments(variant: AttentionVariant) -> tuple[int, float, int | None]:
    slopes = variant.alibi_slopes
    assert slopes is None or (slopes.dtype == torch.float32 and slopes.is_contiguous())
    return variant.window, variant.soft_cap, address_of(slopes)


def address_of(tensor: Tensor | None) -> int | None:
    """For a pointer that may be null."""
    return None if tensor is None else tensor.data_ptr()


def supports_logits(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype == torch.float32 and logits.stride(1) == 1 and is_available()


def sample_greedy(logits: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    num_rows, length = logits.shape
    values, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
    library().quire_sample_greedy(
        logits.data_ptr(), values.data_ptr(), token_ids.data_ptr(), num_rows, length, logits.stride(0), vocab_start,
        torch.get_num_threads(),
    )  # fmt: skip
    return values, token_ids


def sample_full(logits: Tensor, temperature: Tensor, keys: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    num_rows, length = logits.shape
    assert temperature.is_contiguous()
    assert keys.is_contiguous()
    scores, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
    library().quire_sample_full(
        logits.data_ptr(), temperature.data_ptr(), keys.data_ptr(), scores.data_ptr(), token_ids.data_ptr(), num_rows,
        length, logits.stride(0), vocab_start, torch.get_num_threads(),
    )  # fmt: skip
    return scores, token_ids
