"""Text model of Muse Spark (2026): gates of the residual, and norms of what its parts and its experts add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import AttentionSpec, QkNorm
from ..experts import ExpertFields
from ..family import Family
from ..spec import LayerSpec, Names, Norms


@dataclass(frozen=True, slots=True)
class MuseSpark:
    """Parts of Muse Spark that no other family has.

    Attributes:
        gate_temperature: divides the stored gates of the residual.
        result_eps: of the norms of what attention and the feed-forward network add to it.
    """

    gate_temperature: float
    result_eps: float


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the usual names of factors."""
    if hf.get("attention_bias"):
        raise ValueError("biases of attention (attention_bias) of Muse Spark are not supported")
    return hf | {
        "attention_multiplier": hf["head_dim"] ** -0.5 * hf["qk_scale_factor"],
        "logit_scale": hf["output_multiplier"],
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with gated attention, whose norms have an offset; those of theta 0 have no positions."""
    theta = model.hf["rope_parameters"]["rope_theta"]
    thetas = model.hf.get("layer_rope_theta") or [theta] * len(layers)
    if len(thetas) != len(layers) or {*thetas} - {0, theta}:
        raise ConfigError(
            f"{model.name}: layer_rope_theta {thetas!r:.100} is not supported, must be 0 or rope_theta, {theta}, "
            "for each layer"
        )
    norms, changed = Norms(before_mlp="pre_feedforward_layernorm", offset=1.0), []
    for layer, own in zip(layers, thetas, strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        mixer = replace(
            layer.mixer,
            rope=layer.mixer.rope if own else None,
            gate="projection",
            normalizes_results=True,
        )
        changed.append(replace(layer, mixer=mixer, norms=norms))
    return changed


MUSE_SPARK = Family(
    qk_norm=QkNorm("unweighted"),
    experts=ExpertFields(
        "num_local_experts", "moe_intermediate_size", normalized=True, routing="normalized_results"
    ),
    names=Names(
        renames=(
            (r"\.mlp\.pre_expert_proj\.", ".mlp.fc1_latent_proj."),
            (r"\.mlp\.post_expert_proj\.", ".mlp.fc2_latent_proj."),
        )
    ),
    normalizes_embeddings=True,
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=lambda hf: MuseSpark(hf["residual_gate_temperature"], hf["post_norm_eps"]),
)
