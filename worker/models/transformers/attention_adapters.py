"""Adapters for architectures whose modules do not use transformers' attention interface.

An adapter replaces a module's `forward`. It returns the same values, but passes queries, keys and values to `attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....kernels.attention_variant import AttentionVariant

# A module's layer_idx, queries [T, Hq, D], keys and values [T, Hkv, D], scale and variant -> [T, Hq, D].
Attend = Callable[[int, Tensor, Tensor, Tensor, float, AttentionVariant], Tensor]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the ALiBi slope of each head (Press et al., *Train Short, Test Long*, 2022).

    They are a geometric sequence if the number of heads is a power of two. Heads beyond the largest power of two get
    every other slope of the next power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]


class BloomAttention:
    """BLOOM (Le Scao et al., 2022): ALiBi; q, k and v of a head are adjacent."""

    def __init__(self, module: Any, attend: Attend, device: torch.device) -> None:
        self._module, self._attend = module, attend
        slopes = torch.tensor(alibi_slopes(module.num_heads), device=device)
        self._variant = AttentionVariant(alibi_slopes=slopes)

    def forward(
        self, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        module = self._module
        heads = module.query_key_value(hidden_states).view(-1, module.num_heads, 3, module.head_dim)
        q, k, v = heads.unbind(dim=2)
        attended = self._attend(module.layer_idx, q, k, v, module.inv_norm_factor, self._variant)
        return module.dense(attended.reshape(hidden_states.shape)) + residual, None


class FalconAttention:
    """Falcon (Almazrouei et al., 2023): rotary embedding or ALiBi; each KV head follows its query heads."""

    def __init__(self, module: Any, attend: Attend, device: torch.device) -> None:
        self._module, self._attend = module, attend
        config = module.config
        self._num_kv_heads: int = config.num_kv_heads
        if not config.new_decoder_architecture:
            self._num_kv_heads = 1 if config.multi_query else module.num_heads
        self._variant = AttentionVariant()
        if config.alibi:
            # Falcon adds the bias before the scale, so the slopes are scaled as well.
            slopes = torch.tensor(alibi_slopes(module.num_heads), device=device) * module.inv_norm_factor
            self._variant = AttentionVariant(alibi_slopes=slopes)

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        module = self._module
        group_len = module.num_heads // self._num_kv_heads
        projected = module.query_key_value(hidden_states)
        groups = projected.view(-1, self._num_kv_heads, group_len + 2, module.head_dim)
        q = groups[:, :, :-2].flatten(1, 2)
        k, v = groups[:, :, -2], groups[:, :, -1]
        if not module.config.alibi:
            assert position_embeddings is not None
            cos, sin = (part[0].unsqueeze(1) for part in position_embeddings)
            q, k = (x * cos + _rotate_half(x) * sin for x in (q, k))
        attended = self._attend(module.layer_idx, q, k, v, module.inv_norm_factor, self._variant)
        return module.dense(attended.reshape(hidden_states.shape)), None


ADAPTERS: dict[str, Callable[[Any, Attend, torch.device], Any]] = {
    "BloomAttention": BloomAttention,
    "FalconAttention": FalconAttention,
}


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
