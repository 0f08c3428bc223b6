"""The PyTorch reference of each kernel's wrapper."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from quire.kernels.dispatch import twin_of

# Module of a wrapper |-> that of its reference, where their names differ.
_MODULES = {
    "float8_groups": "quantized_linear",
    "index_scores": "sparse_latent",
    "latent_decode": "latent_attention",
    "latent_prefill": "latent_attention",
    "paged_decode": "paged_attention",
    "paged_prefill": "paged_attention",
    "process_logits": "logits",
    "quantize_tokens": "quantized_linear",
    "sample_full": "sampling",
    "sample_top_k_top_p": "sampling",
    "topk_tokens": "sampling",
}


def find_reference(module: str, name: str) -> Callable[..., Any]:
    """Return the reference of a wrapper of kernels.gpu, for `stand_in_gpu.installed`."""
    op: Callable[..., Any] = getattr(
        importlib.import_module(f"quire.kernels.{_MODULES.get(module, module)}"), name
    )
    return twin_of(op)
