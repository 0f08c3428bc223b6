"""Gemma 4: inputs and a factor of each layer, layers of two sizes, and experts beside a dense network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL, AttentionSpec, QkNorm
from ..experts import ExpertFields
from ..family import Family
from ..spec import LayerSpec
from .gemma import FIELDS, SANDWICH, PerLayerInputs, share_kv


@dataclass(frozen=True, slots=True)
class Gemma4:
    """Parts of Gemma 4 that no other family has.

    Attributes:
        inputs: None for none.
    """

    inputs: PerLayerInputs | None


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Gemma 4, whose layers that share keys and values may be twice as wide."""
    num_layers, width = hf["num_hidden_layers"], hf["intermediate_size"]
    num_own = num_layers - (hf.get("num_kv_shared_layers") or 0)
    wide = 2 * width if hf.get("use_double_wide_mlp") else width
    # "vision" concerns the tokens of images only.
    attention = hf.get("use_bidirectional_attention")
    return hf | {
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
        "attention_multiplier": 1.0,
        "layer_intermediate_sizes": [width if index < num_own else wide for index in range(num_layers)],
        "use_bidirectional_attention": None if attention == "vision" else attention,
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """Return the layers with sizes of their own; in full layers keys may be values, too."""
    hf = model.hf
    own_sizes = {int(index): sizes for index, sizes in (hf.get("per_layer_config") or {}).items()}
    layer_types = hf.get("layer_types") or [FULL] * model.num_layers
    changed = []
    for index, layer in enumerate(layers):
        assert isinstance(layer.mixer, AttentionSpec)
        sizes = own_sizes.get(index, {})
        mixer = replace(
            layer.mixer,
            num_kv_heads=sizes.get("num_key_value_heads") or layer.mixer.num_kv_heads,
            head_dim=sizes.get("head_dim") or layer.mixer.head_dim,
            values_are_keys=bool(hf.get("attention_k_eq_v")) and layer_types[index] == FULL,
        )
        changed.append(replace(layer, mixer=mixer))
    return share_kv(model, changed, hf["layer_intermediate_sizes"])


def _read_variant(hf: dict[str, Any]) -> Gemma4:
    size = hf.get("hidden_size_per_layer_input")
    return Gemma4(PerLayerInputs(size, hf["vocab_size_per_layer_input"]) if size else None)


FAMILY = Family(
    fields=FIELDS,
    qk_norm=QkNorm("head"),
    norms=SANDWICH,
    experts=ExpertFields(
        "num_experts", "moe_intermediate_size", "top_k_experts", flag="enable_moe_block", normalized=True
    ),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=_read_variant,
)
