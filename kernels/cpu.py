"""Wrappers of the C++ ops: each checks, allocates and calls. What they compute is said at their PyTorch twins."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .native import library

# Queries of these head_dims have an attention kernel (native/attention.cpp).
HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
# Up to how many tokens panel_linear is faster than oneDNN, by lanes: 1.5 times at 8 tokens and 1.1 at 64 on AVX-512,
# where they meet at 256; on AVX2 1.5 times at 1 token, 1.1 at 2 and slower from 3 on.
_MAX_LINEAR_TOKENS = {16: 256, 8: 2, 4: 1}

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "quire_linear_f32": [_POINTER] * 4 + [_LONG] * 4 + [_INT],
    "quire_rms_norm": [_INT] + [_POINTER] * 3 + [_LONG] * 5 + [_FLOAT, _INT],
    "quire_add_rms_norm": [_INT] + [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT, _INT],
    "quire_silu_and_mul": [_INT] + [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "quire_apply_rope": [_INT] + [_POINTER] * 3 + [_LONG] * 5 + [_INT],
    "quire_write_kv": [_LONG] + [_POINTER] * 3 + [_LONG] * 5,
    "quire_paged_decode": [_INT] + [_POINTER] * 5 + [_LONG] * 7 + [_FLOAT, _INT],
    "quire_paged_prefill": [_INT] + [_POINTER] * 6 + [_LONG] * 7 + [_FLOAT, _INT],
    "quire_exchange": [
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
    "quire_exchange_leave": [_POINTER, _INT],
    "quire_exchange_bytes": [_INT, _LONG],
}


@functools.cache
def ops() -> Any:
    """The library with its signatures; None where there is none."""
    found = library()
    if found is not None:
        for name, arguments in _SIGNATURES.items():
            getattr(found, name).argtypes = arguments
        found.quire_exchange_bytes.restype = _LONG
    return found


@functools.cache
def lanes() -> int:
    """Numbers of a vector register; no length that is not a multiple of it is taken. 0 without the library."""
    return 0 if ops() is None else int(ops().quire_lanes())


@functools.cache
def max_linear_tokens() -> int:
    """Beyond it panel_linear is right but not the fastest."""
    return _MAX_LINEAR_TOKENS.get(lanes(), 0)


def takes(x: Tensor, length: int) -> bool:
    """Whether the ops compute on this tensor, in runs of `length` numbers."""
    return x.is_cpu and x.dtype in _DTYPES and lanes() > 0 and length % lanes() == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., E] of at most three dimensions."""
    length = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    outer, inner = (1, x.shape[0]) if x.dim() == 2 else (x.shape[0], x.shape[1])
    strides = (0, x.stride(0)) if x.dim() == 2 else (x.stride(0), x.stride(1))
    ops().quire_rms_norm(
        _DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, *strides, length, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, length = x.shape
    out = torch.empty_like(x)
    ops().quire_add_rms_norm(
        _DTYPES[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, length, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, length = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, length), dtype=gate_up.dtype)
    ops().quire_silu_and_mul(
        _DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, length, torch.get_num_threads()
    )
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, head_dim = x.shape
    assert x.stride(1) == head_dim
    assert cos.stride() == sin.stride()
    ops().quire_apply_rope(
        _DTYPES[x.dtype], x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim, x.stride(0),
        cos.stride(0), torch.get_num_threads(),
    )  # fmt: skip


def write_kv(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    tokens, _, num_kv_heads, head_dim = kv.shape
    assert kv.dtype == kv_cache.dtype
    assert kv_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    ops().quire_write_kv(
        kv.element_size(), kv.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(), tokens, kv.stride(0),
        2 * num_kv_heads, kv_cache.shape[3], head_dim,
    )  # fmt: skip


def takes_attention(q: Tensor, kv_cache: Tensor) -> bool:
    head_dim = q.shape[-1]
    return (
        takes(q, head_dim) and head_dim in HEAD_DIMS and q.dtype == kv_cache.dtype and q.stride(1) == head_dim
    )


def paged_decode_attention(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    (num_seqs, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q.shape, kv_cache.shape
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype)
    ops().quire_paged_decode(
        _DTYPES[q.dtype], q.data_ptr(), kv_cache.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(),
        out.data_ptr(), num_seqs, num_heads, num_kv_heads, head_dim, block_size, block_tables.stride(0), q.stride(0),
        scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


def paged_prefill_attention(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q.shape, kv_cache.shape
    assert block_tables.dtype == query_start.dtype == seq_lens.dtype == torch.int32
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    ops().quire_paged_prefill(
        _DTYPES[q.dtype], q.data_ptr(), kv_cache.data_ptr(), block_tables.data_ptr(), query_start.data_ptr(),
        seq_lens.data_ptr(), out.data_ptr(), len(seq_lens), num_heads, num_kv_heads, head_dim, block_size,
        block_tables.stride(0), q.stride(0), scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


def panel_linear(x: Tensor, panels: int, panel_stride: int, out_features: int, bias: Tensor | None) -> Tensor:
    """A linear layer of at least one token.

    Args:
        x: [T, K] float32.
        panels: address of the weight as [N / 64, padded K, 64] float32.
        panel_stride: numbers of a panel.
        bias: [N] or None.

    Returns:
        [T, N].
    """
    num_tokens, in_features = x.shape
    assert x.dtype == torch.float32
    out = torch.empty((num_tokens, out_features), dtype=x.dtype)
    ops().quire_linear_f32(
        x.data_ptr(), panels, None if bias is None else bias.data_ptr(), out.data_ptr(), num_tokens, in_features,
        out_features, panel_stride, torch.get_num_threads(),
    )  # fmt: skip
    return out
