"""Wrappers of the C++ ops: each checks, allocates and calls. What they compute is said at their PyTorch twins."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..attention_variant import AttentionVariant
from ..quantized_kv import LIMITS, MIN_MAGNITUDE
from .build import library

# Queries of these head_dims have an attention kernel (native/attention.cpp).
HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_DTYPES = {**DTYPES, torch.int8: 2, torch.float8_e4m3fn: 3}

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
# Sizes, scale, variant and threads.
_ATTENTION = [_LONG] * 7 + [_FLOAT, _LONG, _FLOAT, _POINTER, _INT]
_SIGNATURES = {
    "quire_max_linear_tokens": [],
    "quire_linear": [_INT] * 2 + [_POINTER] * 5 + [_LONG] * 4 + [_INT],
    "quire_panel_rows": [_INT] * 2 + [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "quire_rms_norm": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_FLOAT, _INT],
    "quire_add_rms_norm": [_INT] + [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT, _INT],
    "quire_scale": [_INT, _POINTER, _FLOAT] + [_LONG] * 2 + [_INT],
    "quire_gate_and_mul": [_INT] * 2 + [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "quire_apply_rope": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_INT],
    "quire_write_kv": [_LONG] + [_POINTER] * 3 + [_LONG] * 5,
    "quire_write_kv_quantized": [_INT] * 2 + [_POINTER] * 4 + [_LONG] * 5 + [_FLOAT] * 2,
    "quire_paged_decode": [_INT] * 2 + [_POINTER] * 6 + _ATTENTION,
    "quire_paged_prefill": [_INT] * 2 + [_POINTER] * 7 + _ATTENTION,
    "quire_sample_greedy": [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 2,
    "quire_sample_full": [_POINTER] * 5 + [_LONG] * 3 + [_INT] * 2,
    "quire_decode_layer_bytes": [],
    "quire_decode_layers": (
        [_POINTER, _LONG, _POINTER]
        + [_LONG] * 2
        + [_INT, _LONG]
        + [_POINTER] * 3
        + [_LONG]
        + [_POINTER] * 4
        + [_INT]
    ),
    "quire_shm_collective": [
        _POINTER,
        _INT,
        _INT,
        _LONG,
        ctypes.c_uint32,
        _INT,
        _POINTER,
        _POINTER,
        _LONG,
        _INT,
        _LONG,
    ],
    "quire_shm_collective_leave": [_POINTER, _INT],
    "quire_shm_collective_bytes": [_INT, _LONG],
    "quire_use_huge_pages": [_POINTER, _LONG],
    "quire_keep_freed_memory": [_LONG],
}


@functools.cache
def ops() -> Any:
    """The library with its signatures; None where there is none."""
    found = library()
    if found is not None:
        for name, arguments in _SIGNATURES.items():
            getattr(found, name).argtypes = arguments
        found.quire_max_linear_tokens.restype = _LONG
        found.quire_shm_collective_bytes.restype = _LONG
        found.quire_decode_layer_bytes.restype = _LONG
    return found


@functools.cache
def lanes() -> int:
    """Numbers of a vector register; no length that is not a multiple of it is taken. 0 without the library."""
    return 0 if ops() is None else int(ops().quire_lanes())


def takes(x: Tensor, length: int) -> bool:
    """Whether the ops compute on this tensor, in runs of `length` numbers."""
    return x.is_cpu and x.dtype in DTYPES and lanes() > 0 and length % lanes() == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., E] of at most three dimensions."""
    length = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    outer, inner = (1, x.shape[0]) if x.dim() == 2 else (x.shape[0], x.shape[1])
    strides = (0, x.stride(0)) if x.dim() == 2 else (x.stride(0), x.stride(1))
    ops().quire_rms_norm(
        DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, *strides, inner * length,
        length, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, length = x.shape
    out = torch.empty_like(x)
    ops().quire_add_rms_norm(
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
    ops().quire_gate_and_mul(
        DTYPES[gate_up.dtype], gate, gate_up.data_ptr(), out.data_ptr(), rows, length, torch.get_num_threads()
    )
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, head_dim = x.shape
    assert x.stride(1) == head_dim
    assert cos.stride() == sin.stride()
    ops().quire_apply_rope(
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
        ops().quire_write_kv(
            kv.element_size(), kv.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(), tokens, kv.stride(0),
            2 * num_kv_heads, block_size, head_dim,
        )  # fmt: skip
        return
    assert kv_scales.is_contiguous()
    ops().quire_write_kv_quantized(
        DTYPES[kv.dtype], kv_cache.dtype == torch.float8_e4m3fn, kv.data_ptr(), kv_cache.data_ptr(),
        kv_scales.data_ptr(), slot_mapping.data_ptr(), tokens, kv.stride(0), 2 * num_kv_heads, block_size, head_dim,
        LIMITS[kv_cache.dtype], MIN_MAGNITUDE,
    )  # fmt: skip


def takes_attention(q: Tensor, kv_cache: Tensor) -> bool:
    head_dim = q.shape[-1]
    return (
        takes(q, head_dim)
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
    ops().quire_paged_decode(
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
    ops().quire_paged_prefill(
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


def takes_logits(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype == torch.float32 and logits.stride(1) == 1 and ops() is not None


def sample_greedy(logits: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    num_rows, length = logits.shape
    values, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
    ops().quire_sample_greedy(
        logits.data_ptr(), values.data_ptr(), token_ids.data_ptr(), num_rows, length, logits.stride(0), first_id,
        torch.get_num_threads(),
    )  # fmt: skip
    return values, token_ids


def sample_full(logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    num_rows, length = logits.shape
    assert temperature.is_contiguous()
    assert keys.is_contiguous()
    scores, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
    ops().quire_sample_full(
        logits.data_ptr(), temperature.data_ptr(), keys.data_ptr(), scores.data_ptr(), token_ids.data_ptr(), num_rows,
        length, logits.stride(0), first_id, torch.get_num_threads(),
    )  # fmt: skip
    return scores, token_ids
