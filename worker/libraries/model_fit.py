"""Features of attention that libraries do not support, of a call and of a whole model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.attention_variant import AttentionVariant
from ...proto.config import EngineConfig
from ..attention import LayerCache

DTYPES = (torch.bfloat16, torch.float16)


def find_unsupported(q: Tensor, kv_cache: LayerCache, variant: AttentionVariant) -> str | None:
    """Return a feature of a layer that no library supports in quire's form. Returns None if there is none."""
    features = {
        "a quantized KV cache": kv_cache.scales is not None,
        "linear biases (ALiBi)": variant.alibi_slopes is not None,
        "attention sinks": variant.sinks is not None,
        "chunks of a sequence": bool(variant.chunk),
        f"dtype {str(q.dtype).removeprefix('torch.')}": q.dtype not in DTYPES,
    }
    return next((feature for feature, is_present in features.items() if is_present), None)


def find_unsupported_model(config: EngineConfig, supports_heads: Callable[[int], bool]) -> str:
    """Return what of a model's keys and values makes every layer unsupported; empty if some layers may be supported.

    Args:
        supports_heads: whether the library computes heads of so many numbers.
    """
    model = config.model
    shapes = model.kv_shapes(config.parallel.tensor_parallel_size)
    heads = sorted({dim for parts, _, dim in shapes if parts == 2})
    if not heads:
        return "the model has latents or states in place of keys and values"
    if config.cache.kv_cache_dtype != "auto":
        return f"it does not read a KV cache in {config.cache.kv_cache_dtype} with a scale per token and head"
    if getattr(torch, model.dtype) not in DTYPES:
        return f"the model's dtype is {model.dtype}"
    if not any(map(supports_heads, heads)):
        return f"the model's heads have {' or '.join(map(str, heads))} numbers"
    return ""
