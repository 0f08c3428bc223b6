"""ZAYA (2025): convolved queries and keys, a scaled residual in float32, and routers that read those before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, SLIDING, AttentionSpec
from ..cca import CcaSpec
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..spec import LayerSpec

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}


@dataclass(frozen=True, slots=True)
class Zaya:
    """The routers of ZAYA, whose last choice is no expert.

    Attributes:
        router_size: numbers that a router reads, and hands to the next one.
    """

    router_size: int


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the usual kinds of layers."""
    if hf.get("attention_bias"):
        raise ValueError("biases of attention (attention_bias) of ZAYA are not supported")
    if hf["num_experts_per_tok"] != 1:
        raise ValueError(
            f"num_experts_per_tok is {hf['num_experts_per_tok']}, must be 1 with the routing of ZAYA"
        )
    rope = hf["rope_parameters"]
    return hf | {
        "layer_types": [_KINDS.get(kind, kind) for kind in hf["layer_types"]],
        "intermediate_size": hf["moe_intermediate_size"],
        "rope_parameters": {_KINDS[kind]: rope[kind] for kind in _KINDS if kind in rope},
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with convolutions before their attention."""
    widths, changed = (model.hf["cca_time0"], model.hf["cca_time1"]), []
    if min(widths) < 1 or sum(widths) < 3:
        raise ConfigError(
            f"{model.name}: convolutions of {widths} tokens (cca_time0, cca_time1) are not supported"
        )
    if model.num_kv_heads * model.head_dim % 2:
        raise ConfigError(f"{model.name}: {model.num_kv_heads} KV heads of {model.head_dim} cannot be halved")
    for layer in layers:
        assert isinstance(layer.mixer, AttentionSpec)
        changed.append(replace(layer, mixer=CcaSpec(layer.mixer, widths), mlp=None, has_experts=True))
    return changed


ZAYA = Family(
    fields=FieldNames(qkv_bias="", output_bias=None, head_bias="lm_head_bias"),
    experts=ExpertFields("num_experts", "moe_intermediate_size", shared_count="", normalized=False),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=lambda hf: Zaya(hf["router_hidden_size"]),
)
