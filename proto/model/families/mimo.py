"""MiMo-V2-Flash: values shorter than keys, and layers with windows that have sinks and twice as many KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, SLIDING, AttentionSpec
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..spec import LayerSpec, Names

# Part of a head that is rotated, unless the settings of a kind of layers have another one.
_ROTATED = 0.334


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    return {"partial_rotary_factor": _ROTATED} | hf


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    hf, changed = model.hf, []
    value_dim, scale = hf["v_head_dim"], hf.get("attention_value_scale")
    if not 0 < value_dim <= model.head_dim:
        raise ConfigError(
            f"{model.name}: v_head_dim is {value_dim}, must be at least 1 and at most head_dim, {model.head_dim}"
        )
    for layer, kind in zip(layers, hf.get("layer_types") or [FULL] * model.num_layers, strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        mixer = replace(layer.mixer, value_dim=value_dim, value_scale=1.0 if scale is None else float(scale))
        if kind == SLIDING:
            mixer = replace(mixer, num_kv_heads=2 * model.num_kv_heads, has_sinks=True)
        changed.append(replace(layer, mixer=mixer))
    return changed


V2_FLASH = Family(
    fields=FieldNames(output_bias=None),
    experts=ExpertFields("n_routed_experts", "moe_intermediate_size", routing="corrected_sigmoid"),
    names=Names(renames=((r"\.attention_sink_bias$", ".sinks"),)),
    adapt=_adapt,
    change_layers=_change_layers,
    unused_prefixes=("model.mtp.",),
)
