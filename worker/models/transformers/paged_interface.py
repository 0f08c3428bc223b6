"""Paged attention as an implementation of transformers' attention interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from ....kernels.attention_variant import AttentionVariant
from ....kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from ....proto.errors import ConfigError
from ...attention import AttentionInputs, LayerCache, paged_attention

IMPLEMENTATION = "quire_paged"
# Arguments of the interface that do not change the result.
_IGNORED_ARGUMENTS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "output_attentions",
    "use_cache",
}


class PagedStep:
    """Caches and inputs of the current step, which attention modules read.

    Args:
        num_layers: number of layers; each must attend once per step.
        windows: of each layer, as ModelConfig.layer_windows: the cache has no earlier tokens.
    """

    def __init__(self, num_layers: int, windows: tuple[int, ...] = ()) -> None:
        self._num_layers, self._windows = num_layers, windows or (0,) * num_layers
        self._caches: list[LayerCache] = []
        self._inputs: AttentionInputs | None = None
        self._attended: list[int] = []

    @contextmanager
    def bind(self, caches: list[LayerCache], inputs: AttentionInputs) -> Iterator[None]:
        """Set caches and inputs while the body computes a step.

        Raises:
            ConfigError: at the end, if the layers did not attend once each in order.
        """
        self._caches, self._inputs, self._attended = caches, inputs, []
        try:
            yield
        finally:
            self._caches, self._inputs = [], None
        if self._attended != list(range(self._num_layers)):
            raise ConfigError(
                f"its layers attend in the order {self._attended}, must be 0 to {self._num_layers - 1}"
            )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, variant: AttentionVariant
    ) -> Tensor:
        """Write a layer's keys and values to the cache, and compute its attention.

        Args:
            q: [T, Hq, D].
            k, v: [T, Hkv, D].

        Returns:
            [T, Hq, D].
        """
        assert self._inputs is not None, "attend must be called within bind"
        self._attended.append(layer)
        cache = self._caches[layer]
        if (window := self._windows[layer]) and not 0 < variant.window <= window:
            raise ConfigError(
                f"layer {layer} attends to {variant.window or 'all'} tokens, but its configuration has a window of "
                f"{window}"
            )
        inputs = self._inputs.of_group(cache.group)
        num_kv_heads, head_dim = cache.blocks.shape[2], cache.blocks.shape[4]
        fits = k.shape == v.shape and k.shape[1:] == (num_kv_heads, head_dim)
        if not fits or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
            raise ConfigError(
                f"layer {layer} has queries, keys and values of shapes {list(q.shape)}, {list(k.shape)} and "
                f"{list(v.shape)}, but its configuration has {num_kv_heads} KV heads of {head_dim}"
            )
        heads = torch.cat((q, k, v), dim=1)
        q = fused_qk_norm_rope_kv_write(
            heads, cache.blocks, inputs.slot_mapping, None, None, kv_scales=cache.scales
        )
        return paged_attention(q, cache, inputs, scale, variant)


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
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement the attention interface: [1, H, T, D] each, sinks [Hq] -> [1, T, Hq, D]."""
    own: Any = module
    unsupported = [
        name for name, value in others.items() if value is not None and name not in _IGNORED_ARGUMENTS
    ]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if unsupported:
        raise ConfigError(f"its attention has arguments that are not supported: {', '.join(unsupported)}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError("its attention is not causal")
    layer_type = getattr(own, "layer_type", None) or getattr(own, "attention_type", None)
    if layer_type == "sliding_attention" and not sliding_window:
        raise ConfigError("its sliding-window layers call attention without the window")
    step: PagedStep = own.paged_step
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is not None and s_aux.shape != (q.shape[1],):
        raise ConfigError(f"its attention has sinks of shape {list(s_aux.shape)} for {q.shape[1]} heads")
    sinks = None if s_aux is None else s_aux.detach().float()
    variant = AttentionVariant(window=sliding_window or 0, soft_cap=softcap or 0.0, sinks=sinks)
    attended = step.attend(own.layer_idx, q, k, v, scale, variant)
    return attended.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)
