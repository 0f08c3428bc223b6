"""Qwen3-Next, Qwen3.5 and OLMo Hybrid: gated delta nets between layers with attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL, AttentionSpec, QkNorm
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..gated_delta import GatedDeltaSpec
from ..spec import LayerSpec, Names, Norms

_LINEAR = "linear_attention"
# Of OLMo Hybrid's norm, which its configuration does not state.
_OLMO_NORM_EPS = 1e-5


def adapt_delta_nets(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that says which layers have attention beside the types of these."""
    kinds = hf["layer_types"]
    unrotated = "rope_parameters" in hf and not (hf["rope_parameters"] or {}).get("rope_theta")
    return hf | {
        "layer_types": [FULL if kind == _LINEAR else kind for kind in kinds],
        "is_linear": [kind == _LINEAR for kind in kinds],
        "intermediate_size": hf.get("intermediate_size") or hf.get("moe_intermediate_size"),
        **({"no_rope_layers": [False] * len(kinds)} if unrotated else {}),
    }


def _gated_delta(model: ModelConfig, layout: str, **others: Any) -> GatedDeltaSpec:
    hf = model.hf
    sizes = {
        "num_key_heads": hf["linear_num_key_heads"],
        "num_heads": hf["linear_num_value_heads"],
        "key_dim": hf["linear_key_head_dim"],
        "value_dim": hf["linear_value_head_dim"],
        "width": hf["linear_conv_kernel_dim"],
        "norm_eps": hf["rms_norm_eps"],
    }
    return GatedDeltaSpec(**(sizes | {"layout": layout} | others))


def _change_qwen_layers(layout: str) -> Callable[[ModelConfig, Sequence[LayerSpec]], list[LayerSpec]]:
    def change(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
        """Return the layers with gated delta nets, and with gates of the attention in the others."""
        linear = _gated_delta(model, layout)
        changed = []
        for layer, is_linear in zip(layers, model.hf["is_linear"], strict=True):
            assert isinstance(layer.mixer, AttentionSpec)
            attention = replace(layer.mixer, gate="query")
            changed.append(
                replace(layer, mixer=linear, mixer_name="linear_attn")
                if is_linear
                else replace(layer, mixer=attention)
            )
        return changed

    return change


def _change_olmo_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers with gated delta nets, whose norms come before them."""
    others = {"norm_eps": _OLMO_NORM_EPS, "norm_name": "o_norm", "output_name": "o_proj"}
    scale = 2.0 if model.hf["linear_allow_neg_eigval"] else 1.0
    linear = _gated_delta(model, "separate", beta_scale=scale, **others)
    return [
        replace(layer, mixer=linear, mixer_name="linear_attn", norms=Norms()) if is_linear else layer
        for layer, is_linear in zip(layers, model.hf["is_linear"], strict=True)
    ]


_EXPERTS = ExpertFields(
    "num_experts",
    "moe_intermediate_size",
    shared_size="shared_expert_intermediate_size",
    routing="gated_sharing",
)
QWEN_3_NEXT = Family(
    qk_norm=QkNorm("head"),
    norms=Norms(offset=1.0),
    experts=replace(_EXPERTS, flag="num_experts"),
    adapt=adapt_delta_nets,
    change_layers=_change_qwen_layers("grouped"),
)
QWEN_3_5 = replace(QWEN_3_NEXT, experts=None, change_layers=_change_qwen_layers("parts"))
QWEN_3_5_MOE = replace(QWEN_3_5, experts=replace(_EXPERTS, normalized=True))
OLMO_HYBRID = Family(
    fields=FieldNames(),
    qk_norm=QkNorm("projection"),
    norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    names=Names(
        renames=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        )
    ),
    adapt=adapt_delta_nets,
    change_layers=_change_olmo_layers,
)
