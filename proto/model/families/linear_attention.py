"""Kimi Linear, Ling 3 (`bailing_hybrid`) and MiniMax-Text-01: linear attention between layers with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL
from ..experts import ExpertFields
from ..family import Family
from ..kimi_delta import KimiDeltaSpec
from ..lightning import LightningSpec
from ..mla import UNROTATED, MlaSpec
from ..spec import LayerSpec, Names, ResidualFactors

LINEAR = "linear_attention"
# Of MiniMax's norm of all heads, which its configuration does not state.
_MINIMAX_NORM_EPS = 1e-6
# Names in other versions of the configurations |-> those of the fields that are read.
_FIELDS = {
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# transformers 5 has the parts of the decay in a module of their own.
FORGET_GATE = (r"\.self_attn\.forget_gate\.", ".self_attn.")
_NAMES = Names(renames=(FORGET_GATE, (r"\.block_sparse_moe\.", ".mlp.")))


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that says which layers have attention beside the types of these."""
    kinds = hf["layer_types"]
    usual = {usual: hf[own] for own, usual in _FIELDS.items() if hf.get(own) is not None}
    return hf | usual | {"layer_types": [FULL] * len(kinds), "is_linear": [kind == LINEAR for kind in kinds]}


def read_delta(model: ModelConfig, *, is_low_rank: bool, decay_bound: float | None = None) -> KimiDeltaSpec:
    """Return the Kimi delta attention of a model's layers; see KimiDeltaSpec."""
    hf = model.hf
    return KimiDeltaSpec(
        hf["linear_num_heads"],
        hf["linear_head_dim"],
        hf["linear_conv_kernel_dim"],
        hf["rms_norm_eps"],
        is_low_rank,
        decay_bound,
    )


def _change_kimi_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of Kimi Linear, whose latent attention has no positions."""
    delta, changed = read_delta(model, is_low_rank=True), []
    for layer, is_linear in zip(layers, model.hf["is_linear"], strict=True):
        assert isinstance(layer.mixer, MlaSpec)
        changed.append(replace(layer, mixer=delta if is_linear else replace(layer.mixer, rope=UNROTATED)))
    return changed


def _change_bailing_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of Ling 3, whose latent attention has a gate per head."""
    bound = float(model.hf["kda_lower_bound"]) if model.hf["kda_safe_gate"] else None
    delta, changed = read_delta(model, is_low_rank=False, decay_bound=bound), []
    for layer, is_linear in zip(layers, model.hf["is_linear"], strict=True):
        assert isinstance(layer.mixer, MlaSpec)
        changed.append(replace(layer, mixer=delta if is_linear else replace(layer.mixer, gate="head")))
    return changed


def _change_minimax_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers of MiniMax-Text-01, whose residual is normalized."""
    hf, last, changed = model.hf, model.num_layers - 1, []
    for index, (layer, is_linear) in enumerate(zip(layers, hf["is_linear"], strict=True)):
        kind = "linear_attn" if is_linear else "full_attn"
        factors = ResidualFactors(
            *(float(hf[f"{part}_{which}_factor"]) for part in (kind, "mlp") for which in ("alpha", "beta"))
        )
        own = replace(layer, residual_factors=factors)
        if is_linear:
            slope = 1 - index / (last + 1e-5) + 1e-5
            own = replace(own, mixer=LightningSpec(model.num_heads, model.head_dim, slope, _MINIMAX_NORM_EPS))
        changed.append(own)
    return changed


_EXPERTS = ExpertFields("n_routed_experts", "moe_intermediate_size", routing="corrected_sigmoid")
KIMI_LINEAR = Family(
    qkv_bias=False,
    is_latent=True,
    experts=_EXPERTS,
    names=_NAMES,
    adapt=_adapt,
    change_layers=_change_kimi_layers,
)
BAILING_HYBRID = replace(
    KIMI_LINEAR,
    names=replace(
        _NAMES,
        renames=(
            (r"^model\.word_embeddings\.", "model.embed_tokens."),
            (r"\.attention\.", ".self_attn."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
            *_NAMES.renames,
        ),
    ),
    change_layers=_change_bailing_layers,
)
MINIMAX = Family(
    qkv_bias=False,
    all_layers_windowed=True,
    experts=ExpertFields("num_local_experts", "intermediate_size", normalized=True),
    adapt=_adapt,
    change_layers=_change_minimax_layers,
)
