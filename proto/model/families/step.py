"""Step 3.5 and the text model of Step 3.7: gates of heads, more heads in layers with windows, bounded activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, SLIDING, AttentionSpec, QkNorm
from ..experts import ExpertFields
from ..family import Family
from ..spec import LayerSpec, Names, Norms


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    return hf | {"routed_scaling_factor": hf["moe_router_scaling_factor"]}


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    hf, changed = model.hf, []
    if hf.get("gating", True) not in (True, "per-head"):
        raise ConfigError(f"{model.name}: gating {hf['gating']!r:.100} is not supported, only one of heads")
    routed, shared = (
        [float(limit or 0) for limit in hf.get(field) or [0] * model.num_layers]
        for field in ("swiglu_limits", "swiglu_limits_shared")
    )
    kinds = hf.get("layer_types") or [FULL] * model.num_layers
    for layer, kind, limits in zip(layers, kinds, zip(routed, shared, strict=True), strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        mixer = replace(layer.mixer, gate="head")
        if kind == SLIDING:
            mixer = replace(mixer, num_heads=hf.get("num_sliding_attention_heads") or model.num_heads)
        assert layer.mlp is not None
        mlp = replace(layer.mlp, limit=limits[1])
        changed.append(replace(layer, mixer=mixer, mlp=mlp, expert_limits=limits))
    return changed


def _read_unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Return the layers of draft heads."""
    first = hf["num_hidden_layers"]
    return tuple(f"model.layers.{first + index}." for index in range(hf.get("num_nextn_predict_layers") or 0))


STEP_3 = Family(
    qk_norm=QkNorm("head"),
    norms=Norms(offset=1.0),
    experts=ExpertFields(
        "n_routed_experts",
        "moe_intermediate_size",
        shared_size="share_expert_dim",
        normalized=True,
        routing="corrected_sigmoid",
    ),
    names=Names(
        renames=(
            (r"\.moe\.(gate|up|down)_proj\.weight$", r".mlp.experts.\1_proj"),
            (r"\.moe\.(gate|up|down)_proj\.(weight_\w+)$", r".mlp.experts.\1_proj_\2"),
            (r"\.moe\.gate\.", ".mlp.gate."),
            (r"\.moe\.router_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.share_expert\.", ".mlp.shared_experts."),
        )
    ),
    adapt=_adapt,
    change_layers=_change_layers,
    read_unused=_read_unused,
)
