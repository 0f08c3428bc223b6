"""LongCat-Flash (2025): pairs of layers with a mixture of experts beside them, some of which compute nothing.

The mixture reads what the first feed-forward network of a pair reads; its result is added behind the second one, so
that it may be computed beside the second attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ..experts import ExpertFields
from ..family import Family
from ..mla import MlaSpec
from ..spec import LayerSpec, Names


@dataclass(frozen=True, slots=True)
class LongcatFlash:
    """Layers in pairs, each with a mixture of experts."""


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of LongCat-Flash with the usual names."""
    return hf | {"intermediate_size": hf["ffn_hidden_size"]}


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with a dense network each, whose queries and latents are scaled as a larger rank would be."""
    changed = []
    for layer in layers:
        mixer = layer.mixer
        assert isinstance(mixer, MlaSpec)
        queries, latents = (
            (model.hf["hidden_size"] / model.hf[f"{own}_lora_rank"]) ** 0.5 for own in ("q", "kv")
        )
        mixer = replace(mixer, scale=mixer.scale * queries, latent_scale=latents)
        changed.append(replace(layer, mixer=mixer, has_experts=False))
    return changed


def _unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Return the matrices that transformers stores for experts that compute nothing."""
    first, count = hf["n_routed_experts"], hf.get("zero_expert_num") or 0
    return tuple(
        f"model.layers.{index}.mlp.experts.{expert}."
        for index in range(hf["num_layers"])
        for expert in range(first, first + count)
    )


# The parts of both layers of a pair are named as those of two layers.
_PARTS = "self_attn|mlps|input_layernorm|post_attention_layernorm"
FLASH = Family(
    qkv_bias=False,
    is_latent=True,
    experts=ExpertFields(
        "n_routed_experts", "expert_ffn_hidden_size", "moe_topk", normalized=False, routing="zero_experts"
    ),
    names=Names(mlp="mlps", renames=((rf"^(model\.layers\.\d+)\.({_PARTS})\.([01])\.", r"\1.\3.\2."),)),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=lambda hf: LongcatFlash(),
    unused_prefixes=("model.mtp.",),
    read_unused=_unused,
)
