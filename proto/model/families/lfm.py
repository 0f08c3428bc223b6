"""LFM2, its mixture of experts, and LFM3: short convolutions between layers with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL, AttentionSpec, QkNorm
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..short_conv import ShortConvSpec
from ..spec import LayerSpec, Names, Norms

_CONV = "conv"
_MLP_NAMES = ("w1", "w3", "w2")
_NORMS = Norms("operator_norm", before_mlp="ffn_norm")
_NAMES = Names(attention_output="out_proj", mlp="feed_forward", last_norm="model.embedding_norm")


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that says which layers have attention beside the types of these."""
    kinds = hf["layer_types"]
    return hf | {
        "layer_types": [FULL if kind == _CONV else kind for kind in kinds],
        "is_conv": [kind == _CONV for kind in kinds],
        "first_k_dense_replace": hf.get("num_dense_layers"),
    }


def _adapt_2(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of LFM2, whose feed-forward networks are narrower than it says."""
    width = hf["intermediate_size"]
    if hf.get("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if (factor := hf.get("block_ffn_dim_multiplier")) is not None:
            multiple = hf["block_multiple_of"]
            width = multiple * -(-int(factor * width) // multiple)
    return _adapt(hf) | {"intermediate_size": width}


def _adapt_3(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of LFM3, of whose rope settings some are for layers without positions."""
    adapted = _adapt(hf)
    kinds = set(hf["layer_types"])
    return adapted | {
        "rope_parameters": {kind: own for kind, own in hf["rope_parameters"].items() if kind in kinds}
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers with convolutions in place of the attention of some."""
    hf = model.hf
    conv = ShortConvSpec(hf["hidden_size"], hf["conv_L_cache"], bool(hf.get("conv_bias")))
    changed = []
    for layer, is_conv in zip(layers, hf["is_conv"], strict=True):
        assert layer.mlp is not None
        own = replace(layer, mlp=replace(layer.mlp, gated_names=_MLP_NAMES))
        changed.append(replace(own, mixer=conv, mixer_name=_CONV) if is_conv else own)
    return changed


def _change_layers_3(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of LFM3, whose attention may have gates, and which may have norms after their parts."""
    norms = _NORMS
    if model.hf.get("use_sandwich_norm"):
        norms = replace(norms, after_attention="post_operator_norm", after_mlp="post_ffn_norm")
    gate = "head" if model.hf.get("use_attention_gate") else None
    return [
        replace(
            layer,
            norms=norms,
            mixer=replace(layer.mixer, gate=gate, output_name="o_proj")
            if isinstance(layer.mixer, AttentionSpec)
            else layer.mixer,
        )
        for layer in _change_layers(model, layers)
    ]


LFM_2 = Family(
    fields=FieldNames("norm_eps"),
    qk_norm=QkNorm("head", ("q_layernorm", "k_layernorm")),
    norms=_NORMS,
    names=_NAMES,
    adapt=_adapt_2,
    change_layers=_change_layers,
)
LFM_2_MOE = replace(
    LFM_2,
    experts=ExpertFields("num_experts", "moe_intermediate_size", routing="biased_sigmoid"),
    adapt=_adapt,
)
LFM_3 = replace(
    LFM_2,
    qk_norm=QkNorm("head"),
    names=replace(_NAMES, renames=((r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),)),
    adapt=_adapt_3,
    change_layers=_change_layers_3,
)
