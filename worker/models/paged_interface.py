"""Our attention in transformers' attention interface: modules call it with what they projected, and it runs on the
step's paged caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from ...kernels.attention_variant import AttentionVariant
from ...kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from ...proto.errors import ConfigError
from ..attention import AttentionInputs, LayerCache, paged_attention

IMPLEMENTATION = "quire_paged"
# What modules tell their attention beside what is computed with, and what changes nothing.
_HARMLESS = {"position_ids", "cache_position", "position_embeddings", "output_attentions", "use_cache"}


class PagedStep:
    """The caches and inputs of the step that a model computes, for its attention modules to find.

    Args:
        num_layers: each must attend once a step.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._caches: list[LayerCache] = []
        self._inputs: AttentionInputs | None = None
        self._attended: list[int] = []

    @contextmanager
    def over(self, caches: list[LayerCache], inputs: AttentionInputs) -> Iterator[None]:
        """While a step is computed.

        Raises:
            ConfigError: afterwards, if a layer did not attend or did so twice.
        """
        self._caches, self._inputs, self._attended = caches, inputs, []
        try:
            yield
        finally:
            self._caches, self._inputs = [], None
        if self._attended != list(range(self._num_layers)):
            raise ConfigError(f"its layers attend in the order {self._attended}, not each once")

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, variant: AttentionVariant
    ) -> Tensor:
        """Stores the keys and values of a layer, and attends to them and to those before.

        Args:
            q: [T, Hq, D].
            k, v: [T, Hkv, D].

        Returns:
            [T, Hq, D].
        """
        assert self._inputs is not None, "a module attends outside a step"
        self._attended.append(layer)
        cache = self._caches[layer]
        num_kv_heads, head_dim = cache.blocks.shape[2], cache.blocks.shape[4]
        fits = k.shape == v.shape and k.shape[1:] == (num_kv_heads, head_dim)
        if not fits or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
            raise ConfigError(
                f"layer {layer} has queries, keys and values of shapes {list(q.shape)}, {list(k.shape)} and "
                f"{list(v.shape)}, where its configuration says {num_kv_heads} KV heads of {head_dim}"
            )
        heads = torch.cat((q, k, v), dim=1)
        q = fused_qk_norm_rope_kv_write(
            heads, cache.blocks, self._inputs.slot_mapping, None, None, kv_scales=cache.scales
        )
        return paged_attention(q, cache, self._inputs, scale, variant)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention interface: [1, H, T, D] each -> [1, T, Hq, D]."""
    own: Any = module
    strange = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if strange or attention_mask is not None:
        raise ConfigError(f"its attention has arguments that change it: {', '.join(strange) or 'a mask'}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError("its attention looks ahead")
    named_window = getattr(own, "layer_type", None) or getattr(own, "attention_type", None)
    if named_window == "sliding_attention" and not sliding_window:
        raise ConfigError("its layers have windows that it does not tell their attention")
    step: PagedStep = own.paged_step
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    variant = AttentionVariant(window=sliding_window or 0, soft_cap=softcap or 0.0)
    attended = step.attend(own.layer_idx, q, k, v, scale, variant)
    return attended.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)
