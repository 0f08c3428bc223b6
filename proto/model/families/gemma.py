"""Gemma 2 and 3, and what all later Gemmas share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, QkNorm
from ..family import Family, FieldNames
from ..spec import LayerSpec, Norms

FIELDS = FieldNames(activation="hidden_activation")
# Norms before and after attention and feed-forward network.
SANDWICH = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Embeddings of their own that each layer adds its part of, per token (Gemma 3n, 2025).

    Attributes:
        size: P, elements per layer.
        vocab_size: of these embeddings; other tokens have those of token 0.
    """

    size: int
    vocab_size: int


def share_kv(model: ModelConfig, layers: Sequence[LayerSpec], widths: Sequence[int]) -> Sequence[LayerSpec]:
    """Return layers with their widths, of which the last ones attend to the keys and values of earlier ones.

    The source of a layer is the last layer of the same type that has keys and values of its own.

    Raises:
        ConfigError: there is no such layer.
    """
    layer_types = model.hf.get("layer_types") or [FULL] * model.num_layers
    num_own = model.num_layers - (model.hf.get("num_kv_shared_layers") or 0)
    last_of = {layer_type: index for index, layer_type in enumerate(layer_types[: max(num_own, 0)])}
    missing = sorted(set(layer_types) - set(last_of))
    if missing:
        raise ConfigError(
            f"{model.name}: num_kv_shared_layers leaves no layer of type {missing[0]!r} with keys and values"
        )
    return [
        replace(
            layer,
            mlp=replace(layer.mlp, intermediate_size=widths[index]),
            kv_source=None if index < num_own else last_of[layer_types[index]],
        )
        for index, layer in enumerate(layers)
    ]


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the scale of embeddings."""
    return hf | {"embedding_multiplier": hf["hidden_size"] ** 0.5}


GEMMA_2 = Family(fields=FIELDS, norms=replace(SANDWICH, offset=1.0), adapt=_adapt)
GEMMA_3 = replace(GEMMA_2, qk_norm=QkNorm("head"))
