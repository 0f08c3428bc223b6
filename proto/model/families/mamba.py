"""Families with mixers of Mamba or Mamba 2, alone, between or beside attention, or between feed-forward networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL, AttentionSpec
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..mamba1 import Mamba1Spec
from ..mamba2 import Mamba2Spec, Multipliers
from ..spec import LayerSpec, Names, Norms

_LINEAR, _EXPERTS, _MLP = "linear_attention", "moe", "mlp"


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the kinds of all layers beside the types of attention."""
    kinds = hf.get("layers_block_type") or hf.get("layer_types")
    if kinds is None:
        attention = hf.get("attn_layer_indices") or []
        kinds = [FULL if index in attention else _LINEAR for index in range(hf["num_hidden_layers"])]
    return hf | {"kinds": kinds, "layer_types": [FULL] * len(kinds)}


def _mamba2(model: ModelConfig, **others: Any) -> Mamba2Spec:
    """Return the mixer of the fields that most families have."""
    hf = model.hf
    low, high = hf.get("time_step_limit") or (0.0, math.inf)
    fields: dict[str, Any] = {
        "num_heads": hf.get("mamba_n_heads"),
        "head_dim": hf.get("mamba_d_head"),
        "num_groups": hf.get("mamba_n_groups"),
        "state_size": hf.get("mamba_d_state"),
        "width": hf.get("mamba_d_conv"),
        "norm_eps": hf.get("rms_norm_eps"),
        "conv_bias": bool(hf.get("mamba_conv_bias")),
        "bias": bool(hf.get("mamba_proj_bias")),
        "output_bias": bool(hf.get("mamba_proj_bias")),
        "min_step": float(low),
        "max_step": None if math.isinf(high) else float(high),
    }
    return Mamba2Spec(**(fields | others))


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers with Mamba 2 in place of the attention of some."""
    mixer = _mamba2(model)
    return [
        replace(layer, mixer=mixer, mixer_name="mamba") if kind == _LINEAR else layer
        for layer, kind in zip(layers, model.hf["kinds"], strict=True)
    ]


BAMBA = Family(
    norms=Norms(before_mlp="pre_ff_layernorm"),
    names=Names(mlp="feed_forward", last_norm="model.final_layernorm"),
    adapt=_adapt,
    change_layers=_change_layers,
)


def _adapt_granite(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Granite 4, whose dense layers have the network that others share."""
    adapted = _adapt(hf)
    if hf.get("position_embedding_type") != "rope":
        adapted["no_rope_layers"] = [False] * len(adapted["kinds"])
    return adapted


def _change_granite_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of Granite 4."""
    return [
        layer
        if layer.mlp is None
        else replace(layer, mlp=replace(layer.mlp, intermediate_size=model.hf["shared_intermediate_size"]))
        for layer in _change_layers(model, layers)
    ]


GRANITE_HYBRID = Family(
    fused_gate_up=True,
    experts=ExpertFields(
        "num_local_experts",
        "intermediate_size",
        flag="num_local_experts",
        shared_size="shared_intermediate_size",
        normalized=False,
        routing="top_k_softmax",
    ),
    names=Names(
        mlp="block_sparse_moe.shared_mlp",
        renames=(
            (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
            (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
            (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
            (r"\.shared_mlp\.input_linear\.", ".block_sparse_moe.shared_mlp.gate_up_proj."),
            (r"\.shared_mlp\.output_linear\.", ".block_sparse_moe.shared_mlp.down_proj."),
        ),
    ),
    adapt=_adapt_granite,
    change_layers=_change_granite_layers,
)


def _adapt_falcon(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Falcon-H1, of which all layers are alike."""
    return hf | {
        "layer_types": [FULL] * hf["num_hidden_layers"],
        "logit_scale": hf.get("lm_head_multiplier"),
    }


def _change_falcon_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with Mamba 2 beside their attention."""
    hf = model.hf
    first = hf["ssm_in_multiplier"]
    has_bias = bool(hf.get("mamba_proj_bias"))
    if has_bias and first != 1.0:
        raise ValueError(
            f"ssm_in_multiplier {first} with biases of the projection (mamba_proj_bias) is not supported"
        )
    multipliers = Multipliers(
        tuple(first * own for own in hf["ssm_multipliers"]),
        hf["ssm_out_multiplier"],
        hf["attention_in_multiplier"],
        hf["attention_out_multiplier"],
        hf["key_multiplier"],
    )
    norm = None
    if hf["mamba_rms_norm"]:
        norm = "before_gate" if hf["mamba_norm_before_gate"] else "gate"
    mixer = _mamba2(model, norm=norm, multipliers=multipliers, output_bias=bool(hf.get("projectors_bias")))
    changed = []
    for layer in layers:
        assert isinstance(layer.mixer, AttentionSpec)
        assert layer.mlp is not None
        changed.append(
            replace(
                layer,
                mixer=replace(mixer, attention=layer.mixer),
                mixer_name="mamba",
                mlp=replace(layer.mlp, multipliers=tuple(hf["mlp_multipliers"])),
            )
        )
    return changed


FALCON_H1 = Family(
    norms=Norms(before_mlp="pre_ff_layernorm"),
    names=Names(mlp="feed_forward", last_norm="model.final_layernorm"),
    adapt=_adapt_falcon,
    change_layers=_change_falcon_layers,
)


def _adapt_nemotron(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Nemotron-H, whose attention has no positions."""
    adapted = _adapt(hf)
    kinds = adapted["kinds"]
    return adapted | {
        "has_experts": _EXPERTS in kinds,
        "no_rope_layers": [False] * len(kinds),
        "mlp_layer_types": ["sparse" if kind == _EXPERTS else "dense" for kind in kinds],
    }


def _change_nemotron_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers that are a mixer or a feed-forward network."""
    hf = model.hf
    mixer = Mamba2Spec(
        hf["mamba_num_heads"],
        hf["mamba_head_dim"],
        hf["n_groups"],
        hf["ssm_state_size"],
        hf["conv_kernel"],
        hf["layer_norm_epsilon"],
        conv_bias=bool(hf["use_conv_bias"]),
        bias=bool(hf["use_bias"]),
        output_bias=bool(hf["use_bias"]),
    )
    changed = []
    for layer, kind in zip(layers, hf["kinds"], strict=True):
        if kind in (_MLP, _EXPERTS):
            changed.append(replace(layer, mixer=None))
        else:
            own = mixer if kind == _LINEAR else layer.mixer
            changed.append(replace(layer, mixer=own, mlp=None, has_experts=False))
    return changed


NEMOTRON_H = Family(
    fields=FieldNames("layer_norm_epsilon", "mlp_hidden_act", qkv_bias="", output_bias=None),
    norms=Norms("norm", before_mlp="norm"),
    mlp_names=("up_proj", "down_proj"),
    experts=ExpertFields(
        "n_routed_experts",
        "moe_intermediate_size",
        flag="has_experts",
        shared_size="moe_shared_expert_intermediate_size",
        routing="ungated_sigmoid",
    ),
    names=Names(
        embedding="model.embeddings",
        attention="mixer",
        mlp="mixer",
        last_norm="model.norm_f",
        renames=((r"^backbone\.", "model."),),
    ),
    adapt=_adapt_nemotron,
    change_layers=_change_nemotron_layers,
    unused_prefixes=("mtp.",),
)


def _adapt_pure(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of a model without attention, and so without most of the usual fields."""
    inner = hf.get("intermediate_size") or int(hf["expand"] * hf["hidden_size"])
    return hf | {"intermediate_size": inner, "layer_types": [FULL] * hf["num_hidden_layers"]}


def _change_pure_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers that are mixers of Mamba."""
    hf = model.hf
    mixer = Mamba1Spec(
        hf["intermediate_size"],
        hf["state_size"],
        int(hf["time_step_rank"]),
        hf["conv_kernel"],
        hf.get("mixer_rms_eps", 0.0),
        conv_bias=bool(hf["use_conv_bias"]),
        bias=bool(hf["use_bias"]),
        norms="unweighted" if "mixer_rms_eps" in hf else None,
    )
    return [replace(layer, mixer=mixer, mlp=None) for layer in layers]


def _change_pure_layers_2(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers that are mixers of Mamba 2."""
    hf = model.hf
    mixer = _mamba2(
        model,
        num_heads=hf["num_heads"],
        head_dim=hf["head_dim"],
        num_groups=hf["n_groups"],
        state_size=hf["state_size"],
        width=hf["conv_kernel"],
        norm_eps=hf["layer_norm_epsilon"],
        conv_bias=bool(hf["use_conv_bias"]),
        bias=bool(hf["use_bias"]),
        output_bias=bool(hf["use_bias"]),
    )
    return [replace(layer, mixer=mixer, mlp=None) for layer in layers]


MAMBA = Family(
    fields=FieldNames("layer_norm_epsilon", qkv_bias="", output_bias=None),
    norms=Norms("norm"),
    names=Names(
        embedding="backbone.embeddings",
        layers="backbone.layers",
        attention="mixer",
        last_norm="backbone.norm_f",
        renames=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    ),
    adapt=_adapt_pure,
    change_layers=_change_pure_layers,
)
MAMBA_2 = replace(MAMBA, change_layers=_change_pure_layers_2)


def _adapt_jamba(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Jamba, which has periods instead of lists."""
    layers = range(hf["num_hidden_layers"])

    def is_of(what: str, index: int) -> bool:
        return bool(index % hf[f"{what}_layer_period"] == hf[f"{what}_layer_offset"])

    return hf | {
        "layer_types": [FULL] * len(layers),
        "kinds": [FULL if is_of("attn", index) else _LINEAR for index in layers],
        "mlp_layer_types": ["sparse" if is_of("expert", index) else "dense" for index in layers],
        "no_rope_layers": [False] * len(layers),
        "is_mixture": hf["num_experts"] > 1,
    }


def _change_jamba_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers with Mamba in place of the attention of some."""
    hf = model.hf
    mixer = Mamba1Spec(
        int(hf["mamba_expand"] * hf["hidden_size"]),
        hf["mamba_d_state"],
        int(hf["mamba_dt_rank"]),
        hf["mamba_d_conv"],
        hf["rms_norm_eps"],
        conv_bias=bool(hf["mamba_conv_bias"]),
        bias=bool(hf["mamba_proj_bias"]),
        norms="weighted",
    )
    return [
        replace(layer, mixer=mixer, mixer_name="mamba") if kind == _LINEAR else layer
        for layer, kind in zip(layers, hf["kinds"], strict=True)
    ]


JAMBA = replace(
    BAMBA,
    fields=FieldNames(qkv_bias="", output_bias=None),
    experts=ExpertFields("num_experts", "intermediate_size", flag="is_mixture", normalized=False),
    adapt=_adapt_jamba,
    change_layers=_change_jamba_layers,
)
