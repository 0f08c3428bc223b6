"""Attention of chunks by FlashAttention 3 for Hopper, where it is installed (Shah et al., 2024).

The kernels of quire stay the reference; they also compute what FlashAttention does not support.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention_variant import PLAIN, AttentionVariant
from .paged_attention import paged_prefill_attention

# Names of the module, as built from its repository and as packaged.
MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
MAX_HEAD_DIM = 256

# The signature of paged_prefill_attention.
ChunkAttention = Callable[..., Tensor]


class FlashAttention:
    """Computes paged_prefill_attention with FlashAttention 3.

    Args:
        attend: its ``flash_attn_with_kvcache``.

    Attributes:
        num_calls: calls that FlashAttention computed.
        unsupported: features for which the kernels of quire computed other calls.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self._attend = attend
        self.num_calls = 0
        self.unsupported: set[str] = set()

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """See kernels.paged_attention."""
        feature = _find_unsupported(q, variant, kv_scales)
        if feature is not None:
            self.unsupported.add(feature)
            return paged_prefill_attention(
                q, kv_cache, block_tables, query_start, seq_lens, scale, variant, kv_scales
            )
        self.num_calls += 1
        keys, values = kv_cache.transpose(2, 3).unbind(1)  # [N, B, Hkv, D] each
        return self._attend(
            q,
            keys,
            values,
            cache_seqlens=seq_lens,
            page_table=block_tables,
            cu_seqlens_q=query_start,
            # An upper bound, so that the host need not know the longest chunk.
            max_seqlen_q=len(q),
            softmax_scale=scale,
            causal=True,
            # Keys before the query's own.
            window_size=(variant.window - 1, 0) if variant.window else (-1, -1),
            softcap=variant.soft_cap,
        )


def load_flash_attention() -> FlashAttention:
    """Return attention by the installed FlashAttention 3. Raises ImportError if it is not installed."""
    for name in MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        return FlashAttention(module.flash_attn_with_kvcache)
    raise ImportError(f"there is no module {' or '.join(MODULES)}")


def _find_unsupported(q: Tensor, variant: AttentionVariant, kv_scales: Tensor | None) -> str | None:
    """Return a feature that FlashAttention does not support. Returns None if it supports all."""
    features = {
        "a quantized KV cache": kv_scales is not None,
        "linear biases (ALiBi)": variant.alibi_slopes is not None,
        "attention sinks": variant.sinks is not None,
        "chunks of a sequence": bool(variant.chunk),
        f"dtype {q.dtype}": q.dtype not in (torch.bfloat16, torch.float16),
        f"heads of {q.shape[2]} dimensions": q.shape[2] > MAX_HEAD_DIM,
    }
    return next((feature for feature, is_present in features.items() if is_present), None)
