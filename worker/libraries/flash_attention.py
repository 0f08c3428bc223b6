"""Attention of chunks by FlashAttention 3 for Hopper, where it is installed (Shah et al., 2024).

The kernels of quire compute decodes, and what FlashAttention does not support.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.attention_variant import AttentionVariant
from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ..attention import OWN_ATTENTION, AttentionInputs, LayerCache, with_library
from .installed import FLASH_ATTENTION, Capability, Library
from .model_fit import find_unsupported, find_unsupported_model

MAX_HEAD_DIM = 256


class FlashAttention:
    """AttentionBackend, GraphAttention and StepAttention with FlashAttention 3 for chunks.

    Args:
        attend: its ``flash_attn_with_kvcache``.

    Attributes:
        num_calls: calls that FlashAttention computed.
        unsupported: features for which the kernels of quire computed other calls.
    """

    library: ClassVar[Library] = FLASH_ATTENTION
    reads_lens = False

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self._attend = attend
        self.num_calls = 0
        self.unsupported: set[str] = set()

    @classmethod
    def load(cls, device: torch.device) -> FlashAttention:
        """Import the installed library. Raises ImportError if there is none."""
        return load_flash_attention()

    @staticmethod
    def find_problem(config: EngineConfig, capability: Capability) -> str:
        """Return why it would compute no layer of a model; empty if it computes some."""
        return find_unsupported_model(config, lambda head_dim: head_dim <= MAX_HEAD_DIM)

    def begin_step(self, inputs: AttentionInputs) -> AttentionInputs:
        return with_library(inputs, self)

    def for_graphs(self) -> FlashAttention:
        return self

    def of_decodes(self, num_decodes: int) -> FlashAttention:
        return self

    def plan(self, num_decodes: int, block_tables: Sequence[Tensor], lens: IntArray) -> None:
        """Do nothing: it plans on the device."""

    def describe(self) -> str:
        if not self.num_calls:
            return "Triton kernels; no prompt was computed by FlashAttention 3 yet"
        others = ", ".join(sorted(self.unsupported))
        layers = f", and of layers with {others}" if others else ""
        return f"of prompts by FlashAttention 3; Triton kernels of decodes{layers}"

    def decode(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        return OWN_ATTENTION.decode(q, kv_cache, inputs, scale, variant)

    def decode_latents(
        self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, scale: float, value_dim: int
    ) -> Tensor:
        return OWN_ATTENTION.decode_latents(q, kv_cache, inputs, scale, value_dim)

    def prefill(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        feature = find_unsupported(q, kv_cache, variant)
        if feature is None and variant.sinks is not None:
            feature = "attention sinks"
        if feature is None and q.shape[2] > MAX_HEAD_DIM:
            feature = f"heads of {q.shape[2]} numbers"
        if feature is not None:
            self.unsupported.add(feature)
            return OWN_ATTENTION.prefill(q, kv_cache, inputs, scale, variant)
        self.num_calls += 1
        split = inputs.num_decodes
        keys, values = kv_cache.blocks.transpose(2, 3).unbind(1)  # [N, B, Hkv, D] each
        return self._attend(
            q,
            keys,
            values,
            cache_seqlens=inputs.seq_lens[split:],
            page_table=inputs.block_tables[split:],
            cu_seqlens_q=inputs.query_start,
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
    for name in FLASH_ATTENTION.modules:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        return FlashAttention(module.flash_attn_with_kvcache)
    raise ImportError(f"there is no module {' or '.join(FLASH_ATTENTION.modules)}")
