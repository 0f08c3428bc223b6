"""Families with the latent attention of DeepSeek-V2 and V3: scaled, with temperatures, gates or further norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ..experts import ExpertFields
from ..family import Family
from ..mla import MlaSpec
from ..spec import LayerSpec, Names, Norms
from ..streams import Streams

DEEPSEEK_EXPERTS = ExpertFields("n_routed_experts", "moe_intermediate_size", routing="corrected_sigmoid")
DEEPSEEK = Family(qkv_bias=False, is_latent=True, experts=DEEPSEEK_EXPERTS)


def _adapt_mistral(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Mistral 4, whose rotated part is a part of the whole head there."""
    rope = {name: value for name, value in hf["rope_parameters"].items() if name != "partial_rotary_factor"}
    return hf | {"rope_parameters": rope}


MISTRAL_4 = replace(
    DEEPSEEK, experts=replace(DEEPSEEK_EXPERTS, routing="grouped_softmax"), adapt=_adapt_mistral
)


def _adapt_minicpm(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of MiniCPM3 with the usual names of its scales."""
    return hf | {
        "embedding_multiplier": hf["scale_emb"],
        "residual_multiplier": hf["scale_depth"] / hf["num_hidden_layers"] ** 0.5,
        "logits_scaling": hf["hidden_size"] / hf["dim_model_base"],
        "rope_interleave": False,
    }


MINICPM_3 = replace(DEEPSEEK, experts=None, adapt=_adapt_minicpm)


def _change_axk1_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of A.X K1, whose experts' results are normalized."""
    normed = Norms(after_mlp="post_mlp_layernorm")
    return [replace(layer, norms=normed) if layer.has_experts else layer for layer in layers]


def _unused_axk1(hf: dict[str, Any]) -> tuple[str, ...]:
    """Return the norms of dense layers, which published checkpoints have."""
    kinds = hf["mlp_layer_types"]
    return tuple(
        f"model.layers.{index}.post_mlp_layernorm." for index, kind in enumerate(kinds) if kind == "dense"
    )


AXK_1 = replace(
    DEEPSEEK,
    experts=replace(DEEPSEEK_EXPERTS, routing="optionally_corrected_sigmoid"),
    names=Names(renames=((r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),)),
    change_layers=_change_axk1_layers,
    read_unused=_unused_axk1,
)


def _change_axk2_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of A.X K2, with gates of attention, of the norms before it, and of those before experts."""
    changed = []
    for layer in layers:
        assert isinstance(layer.mixer, MlaSpec)
        norms = Norms()
        gated = ("before_attention", "before_mlp") if layer.has_experts else ("before_attention",)
        mixer = replace(layer.mixer, gate="query", joins_latents=True)
        norms = replace(norms, gated=gated, gate_rank=model.hf["gated_norm_rank"])
        changed.append(replace(layer, mixer=mixer, norms=norms))
    return changed


AXK_2 = replace(
    DEEPSEEK,
    indexer_interleaved=False,
    names=Names(
        renames=(
            (r"\.self_attn\.q_gate_proj\.", ".self_attn.q_b_proj."),
            (r"_layernorm\.W_down\b", "_layernorm.mlp.fc1"),
            (r"_layernorm\.W_up\b", "_layernorm.mlp.fc2"),
        )
    ),
    change_layers=_change_axk2_layers,
)


def _adapt_hy4(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of HY V4, whose rotated parts are halves."""
    return hf | {"rope_interleave": False}


def _change_hy4_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of HY V4, with sinks and gates of attention."""
    changed = []
    for layer in layers:
        mixer = layer.mixer
        assert isinstance(mixer, MlaSpec)
        assert mixer.indexer is not None
        indexer = replace(mixer.indexer, rotates_last=True, norm_eps=float(model.hf["rms_norm_eps"]))
        changed.append(replace(layer, mixer=replace(mixer, has_sinks=True, gate="value", indexer=indexer)))
    return changed


HY_4 = replace(
    DEEPSEEK,
    indexer_interleaved=False,
    experts=replace(DEEPSEEK_EXPERTS, routing="clamped_sigmoid"),
    names=Names(
        renames=(
            (r"\.hc_pre\.hc_", ".hc_"),
            (r"\.learnable_sink_param$", ".sinks"),
            (r"\.linear_gate\.", ".gate_proj."),
            (r"\.hc_attn_layer\.hc_(fn|base|scale)$", r".attn_hc.\1"),
            (r"\.hc_mlp_layer\.hc_(fn|base|scale)$", r".ffn_hc.\1"),
            (r"\.hc_head_(fn|base|scale)$", r".hc_\1"),
        )
    ),
    adapt=_adapt_hy4,
    change_layers=_change_hy4_layers,
    read_variant=lambda hf: Streams(hf["hc_mult"], hf["hc_eps"], hf["hc_magnitude"]),
    unused_prefixes=("model.mtp_layers.",),
)
