"""Wrappers of the C++ ops: each checks, allocates and calls. The PyTorch references in `kernels` describe the ops."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ..attention_variant import AttentionVariant
from .fallbacks import log_fallback
from .library import dtype_codes, gate_codes, head_dims, is_available, library, simd_lanes

_COMPUTE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def supports(x: Tensor, length: int = 0) -> bool:
    """Return whether the ops compute on this tensor, whose runs of `length` numbers are contiguous; 0 for any."""
    return x.is_cpu and x.dtype in _COMPUTE_DTYPES and simd_lanes() > 0 and length % simd_lanes() == 0


def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation (native/constants.h) of each number of a contiguous tensor."""
    out = torch.empty_like(x)
    library().quire_activate(
        _code(x), gate_codes()[activation], x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads()
    )
    return out


def clamped_silu_and_mul(gate_up: Tensor, alpha: float, limit: float, offset: float) -> Tensor:
    rows, length = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, length), dtype=gate_up.dtype)
    library().quire_clamped_gate_and_mul(
        _code(gate_up),
        alpha,
        limit,
        offset,
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        length,
        torch.get_num_threads(),
    )
    return out


def log_sum_exp(values: Tensor) -> Tensor:
    rows, length = values.shape
    out = torch.empty(rows)
    library().quire_log_sum_exp(
        values.data_ptr(), out.data_ptr(), rows, length, values.stride(0), torch.get_num_threads()
    )
    return out


def attention_dim(head_dim: int) -> int | None:
    """Return the smallest head_dim of an attention kernel that is not below this one; None if there is none."""
    return min((own for own in head_dims() if own >= head_dim), default=None)


def cache_dtypes() -> Set[torch.dtype]:
    """Return the dtypes of caches that the ops of attention read."""
    return dtype_codes().keys()


def supports_attention(q: Tensor, kv_cache: Tensor) -> bool:
    """Return whether there is an attention kernel for these queries and this cache; log if there is none."""
    head_dim = q.shape[-1]
    is_supported = (
        supports(q, head_dim)
        and head_dim in head_dims()
        and kv_cache.dtype in dtype_codes()
        and q.stride(1) == head_dim
        and kv_cache.is_contiguous()
    )
    if q.is_cpu and not is_supported and not (supports(q) and attention_dim(head_dim)):
        sizes = f"a head_dim of {head_dim}, queries of {q.dtype} and a cache of {kv_cache.dtype}"
        log_fallback("attention", f"there is no C++ op for {sizes}")
    return is_supported


def supports_rows(q: Tensor, cache: Tensor, value_dim: int) -> bool:
    """Return whether there are kernels for these queries and a cache with one row per token; log if there are none.

    Args:
        value_dim: the first numbers of a row, which are its value.
    """
    dim = q.shape[-1]
    is_supported = (
        supports(q, dim) and supports(q, value_dim) and cache.dtype in dtype_codes() and q.stride(1) == dim
    )
    if q.is_cpu and not is_supported:
        sizes = f"latents of {dim} numbers, queries of {q.dtype} and a cache of {cache.dtype}"
        log_fallback("latent attention", f"there is no C++ op for {sizes}")
    return is_supported


def supports_logits(logits: Tensor) -> bool:
    """Return whether the sampling ops compute on these logits."""
    return logits.is_cpu and logits.dtype == torch.float32 and logits.stride(1) == 1 and is_available()


def address_of(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's data; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def _code(tensor: Tensor) -> int:
    return dtype_codes()[tensor.dtype]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [..., E] of two or three dimensions."""
    length = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    outer, inner = (1, x.shape[0]) if x.dim() == 2 else (x.shape[0], x.shape[1])
    strides = (0, x.stride(0)) if x.dim() == 2 else (x.stride(0), x.stride(1))
    library().quire_rms_norm(
        _code(x), x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, *strides, inner * length,
        length, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, length = x.shape
    out = torch.empty_like(x)
    library().quire_add_rms_norm(
        _code(x), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, length, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gate_and_mul(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gate_and_mul(gate_up, "gelu_tanh")


def _gate_and_mul(gate_up: Tensor, gate: str) -> Tensor:
    rows, length = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, length), dtype=gate_up.dtype)
    library().quire_gate_and_mul(
        _code(gate_up), gate_codes()[gate], gate_up.data_ptr(), out.data_ptr(), rows, length,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, head_dim = x.shape
    assert x.stride(1) == head_dim
    assert cos.stride() == sin.stride()
    library().quire_apply_rope(
        _code(x), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim, cos.shape[1],
        x.stride(0), cos.stride(0), torch.get_num_threads(),
    )  # fmt: skip


def write_kv(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, num_parts, num_kv_heads, head_dim = kv.shape
    assert kv.dtype == kv_cache.dtype
    assert kv_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    library().quire_write_kv(
        kv.element_size(), kv.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(), num_tokens, kv.stride(0),
        num_parts * num_kv_heads, kv_cache.shape[3], head_dim,
    )  # fmt: skip


def write_quantized_kv(
    kv: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor,
    slot_mapping: Tensor,
    limit: float,
    min_magnitude: float,
) -> None:
    num_tokens, num_parts, num_kv_heads, head_dim = kv.shape
    assert kv_cache.dtype in (torch.int8, torch.float8_e4m3fn)
    assert kv_cache.is_contiguous()
    assert kv_scales.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    library().quire_write_kv_quantized(
        _code(kv), _code(kv_cache), kv.data_ptr(), kv_cache.data_ptr(),
        kv_scales.data_ptr(), slot_mapping.data_ptr(), num_tokens, kv.stride(0), num_parts * num_kv_heads,
        kv_cache.shape[3], head_dim, limit, min_magnitude,
    )  # fmt: skip


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
    _check_per_head(variant.alibi_slopes)
    _check_per_head(variant.sinks)
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype)
    library().quire_paged_decode(
        _code(q), _code(kv_cache), q.data_ptr(), kv_cache.data_ptr(), address_of(kv_scales),
        block_tables.data_ptr(), seq_lens.data_ptr(), out.data_ptr(), num_seqs, num_heads, num_kv_heads, head_dim,
        block_size, block_tables.stride(0), q.stride(0), scale,
        *_native_variant(variant), torch.get_num_threads(),
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
    visible: Tensor | None = None,
) -> Tensor:
    """Compute the causal attention of chunks.

    Args:
        visible: [T, L] bool, the keys that each token may attend to; None for all.
    """
    (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q.shape, kv_cache.shape
    assert block_tables.dtype == query_start.dtype == seq_lens.dtype == torch.int32
    assert visible is None or (visible.dtype == torch.bool and visible.stride(1) == 1)
    _check_per_head(variant.alibi_slopes)
    _check_per_head(variant.sinks)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    library().quire_paged_prefill(
        _code(q), _code(kv_cache), q.data_ptr(), kv_cache.data_ptr(), address_of(kv_scales),
        block_tables.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(), out.data_ptr(), len(seq_lens),
        num_heads, num_kv_heads, head_dim, block_size, block_tables.stride(0), q.stride(0), scale,
        *_native_variant(variant), address_of(visible), 0 if visible is None else visible.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def latent_decode_attention(
    q: Tensor,
    latents: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    kv_scales: Tensor | None,
) -> Tensor:
    (num_seqs, num_heads, dim), (_, num_parts, num_kv_heads, block_size, _) = q.shape, latents.shape
    assert num_parts == num_kv_heads == 1
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert block_tables.stride(1) == 1
    out = torch.empty((num_seqs, num_heads, value_dim), dtype=q.dtype)
    library().quire_latent_decode(
        _code(q), _code(latents), q.data_ptr(), latents.data_ptr(), address_of(kv_scales), block_tables.data_ptr(),
        seq_lens.data_ptr(), out.data_ptr(), num_seqs, num_heads, dim, value_dim, _row_stride(latents), block_size,
        block_tables.stride(0), q.stride(0), scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    top_k: int,
    key_scales: Tensor | None,
) -> Tensor:
    (num_tokens, num_heads, dim), (_, _, _, block_size, _) = q.shape, keys.shape
    assert q.stride(1) == dim
    assert weights.is_contiguous()
    assert block_tables.stride(1) == 1
    assert rows.dtype == torch.int64
    assert block_tables.dtype == lens.dtype == torch.int32
    scores = torch.empty((num_tokens, block_tables.shape[1] * block_size))
    library().quire_index_scores(
        _code(q), _code(keys), q.data_ptr(), weights.data_ptr(), keys.data_ptr(), address_of(key_scales),
        block_tables.data_ptr(), rows.data_ptr(), lens.data_ptr(), scores.data_ptr(), num_tokens, num_heads, dim,
        block_size, block_tables.stride(0), q.stride(0), _row_stride(keys), scores.shape[1], top_k,
        torch.get_num_threads(),
    )  # fmt: skip
    return scores


def choose_tokens(scores: Tensor, lens: Tensor, top_k: int) -> Tensor:
    num_tokens, width = scores.shape
    assert scores.dtype == torch.float32
    assert lens.dtype == torch.int32
    assert scores.is_contiguous()
    chosen = torch.empty((num_tokens, width), dtype=torch.bool)
    library().quire_choose_tokens(
        scores.data_ptr(),
        lens.data_ptr(),
        chosen.data_ptr(),
        num_tokens,
        width,
        top_k,
        torch.get_num_threads(),
    )
    return chosen


def chosen_slots(
    chosen: Tensor, block_tables: Tensor, rows: Tensor, block_size: int, top_k: int
) -> tuple[Tensor, Tensor]:
    num_tokens, width = chosen.shape
    assert chosen.is_contiguous()
    assert rows.dtype == torch.int64
    assert block_tables.dtype == torch.int32
    slots, counts = (
        torch.empty((num_tokens, top_k), dtype=torch.int32),
        torch.empty(num_tokens, dtype=torch.int32),
    )
    library().quire_chosen_slots(
        chosen.data_ptr(), block_tables.data_ptr(), rows.data_ptr(), slots.data_ptr(), counts.data_ptr(), num_tokens,
        width, top_k, block_size, block_tables.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return slots, counts


def _row_stride(cache: Tensor) -> int:
    """Return the distance of the rows of tokens, which may be a part of wider ones; it is the same for all tokens."""
    num_blocks, _, _, block_size, _ = cache.shape
    assert cache.stride(4) == 1
    if block_size == 1:
        return cache.stride(0)
    assert num_blocks == 1 or cache.stride(0) == block_size * cache.stride(3)
    return cache.stride(3)


def _check_per_head(numbers: Tensor | None) -> None:
    assert numbers is None or (numbers.dtype == torch.float32 and numbers.is_contiguous())


def _native_variant(variant: AttentionVariant) -> tuple[int, int, float, int | None, int | None]:
    slopes, sinks = address_of(variant.alibi_slopes), address_of(variant.sinks)
    return variant.window, variant.chunk, variant.soft_cap, slopes, sinks


def sample_greedy(
    logits: Tensor, masks: tuple[Tensor, Tensor] | None, vocab_start: int
) -> tuple[Tensor, Tensor]:
    num_rows, length = logits.shape
    values, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
    library().quire_sample_greedy(
        logits.data_ptr(), values.data_ptr(), token_ids.data_ptr(), *_mask_arguments(masks, length), num_rows, length,
        logits.stride(0), vocab_start, torch.get_num_threads(),
    )  # fmt: skip
    return values, token_ids


def sample_full(
    logits: Tensor, masks: tuple[Tensor, Tensor] | None, temperature: Tensor, keys: Tensor, vocab_start: int
) -> tuple[Tensor, Tensor]:
    num_rows, length = logits.shape
    assert temperature.is_contiguous()
    assert keys.is_contiguous()
    scores, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
    library().quire_sample_full(
        logits.data_ptr(), temperature.data_ptr(), keys.data_ptr(), scores.data_ptr(), token_ids.data_ptr(),
        *_mask_arguments(masks, length), num_rows, length, logits.stride(0), vocab_start, torch.get_num_threads(),
    )  # fmt: skip
    return scores, token_ids


def mask_logits(logits: Tensor, masks: tuple[Tensor, Tensor]) -> None:
    num_rows, num_tokens = logits.shape
    library().quire_mask_logits(
        logits.data_ptr(), *_mask_arguments(masks, num_tokens), num_rows, num_tokens, logits.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip


def _mask_arguments(
    masks: tuple[Tensor, Tensor] | None, num_tokens: int
) -> tuple[int | None, int | None, int]:
    """Return the masks' pointers and their words per row; null pointers for None."""
    if masks is None:
        return None, None, 0
    slots, words = masks
    assert slots.is_contiguous()
    assert words.is_contiguous()
    assert words.shape[1] * 32 >= num_tokens
    return slots.data_ptr(), words.data_ptr(), words.shape[1]


def route_experts(
    scores: Tensor,
    correction: Tensor | None,
    top_k: int,
    groups: tuple[int, int, int],
    sum_lanes: int,
    epsilon: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose experts as `routing.Routing` does.

    Args:
        groups: number of groups, and of best ones, and best scores of a group that are added up.
        sum_lanes: numbers per vector of torch.sum if the weights are normalized, otherwise 0.
    """
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    assert correction is None or (correction.dtype == torch.float32 and correction.is_contiguous())
    num_tokens, num_experts = scores.shape
    weights = torch.empty((num_tokens, top_k))
    expert_ids = torch.empty((num_tokens, top_k), dtype=torch.int64)
    library().quire_select_experts(
        scores.data_ptr(), address_of(correction), weights.data_ptr(), expert_ids.data_ptr(), num_tokens, num_experts,
        top_k, *groups, sum_lanes, epsilon, scale, torch.get_num_threads(),
    )  # fmt: skip
    return weights, expert_ids
