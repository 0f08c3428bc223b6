"""Features of attention that libraries do not support, of a call and of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels.attention_variant import AttentionVariant
from ...proto.config import EngineConfig
from ..attention import LayerCache

DTYPES = (torch.bfloat16, torch.float16)


def find_unsupported(
    q: Tensor, kv_cache: LayerCache, variant: AttentionVariant, *, supports_fixed_scales: bool = False
) -> str | None:
    """Return a feature of a layer that no library supports in quire's form. Returns None if there is none.

    Args:
        supports_fixed_scales: the library supports a quantized cache with one scale for keys and one for values.
    """
    has_fixed = supports_fixed_scales and kv_cache.fixed_scales is not None
    features = {
        "a quantized KV cache": kv_cache.scales is not None and not has_fixed,
        "linear biases (ALiBi)": variant.alibi_slopes is not None,
        "chunks of a sequence": bool(variant.chunk),
        f"dtype {str(q.dtype).removeprefix('torch.')}": q.dtype not in DTYPES,
    }
    return next((feature for feature, is_present in features.items() if is_present), None)


def find_unsupported_model(
    config: EngineConfig,
    supports_heads: Callable[[int], bool],
    latent_dims: Sequence[tuple[int, int]] = (),
    kv_dtypes: Sequence[str] = (),
) -> str:
    """Return what of a model's keys and values makes every layer unsupported; empty if some layers may be supported.

    Args:
        supports_heads: whether the library computes heads of so many numbers.
        latent_dims: elements of the latents, and of the keys that heads share, whose decodes it computes.
        kv_dtypes: of a quantized KV cache, which it reads.
    """
    model = config.model
    shapes = model.kv_shapes(config.parallel.tensor_parallel_size)
    heads = sorted({dim for parts, _, dim in shapes if parts == 2})
    latents = model.hf.get("kv_lora_rank"), model.hf.get("qk_rope_head_dim")
    has_latents = any(parts == 1 for parts, _, _ in shapes) and latents in latent_dims
    if not heads and not has_latents:
        return "the model has latents or states in place of keys and values"
    if config.cache.kv_cache_dtype not in ("auto", *kv_dtypes):
        return f"it does not read a KV cache in {config.cache.kv_cache_dtype}"
    if getattr(torch, model.dtype) not in DTYPES:
        return f"the model's dtype is {model.dtype}"
    if not has_latents and not any(map(supports_heads, heads)):
        return f"the model's heads have {' or '.join(map(str, heads))} numbers"
    return ""
