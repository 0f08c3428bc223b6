"""Gemma 1, 2, 3, 3n and 4, and RecurrentGemma.

Layers of Gemma 3n and 4 share keys and values, and have inputs and widths of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, SLIDING, AttentionSpec, QkNorm
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..rg_lru import RgLruSpec
from ..spec import LayerSpec, Names, Norms

# Norms before and after attention and feed-forward network.
_SANDWICH = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Embeddings of their own that each layer adds its part of, per token (Gemma 3n, 2025).

    Attributes:
        size: P, elements per layer.
        vocab_size: of these embeddings; other tokens have those of token 0.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Gemma3n:
    """Per-layer inputs, and several streams of the residual, of which a layer computes one (Baykal et al., 2023).

    Attributes:
        num_streams: N.
        active: index of the stream that layers compute.
        scales_output: the computed stream is scaled by stored numbers before the layer's inputs are gated by it.
        laurel_rank: elements of the low-rank addend of attention.
        sparsities: of the feed-forward network of each layer; 0 for a dense one.
    """

    inputs: PerLayerInputs
    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
    sparsities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Gemma4:
    """Parts of Gemma 4 that no other family has.

    Attributes:
        inputs: None for none.
        pad_token_id: whose embeddings the per-layer inputs have at the places of images.
    """

    inputs: PerLayerInputs | None
    pad_token_id: int = 0


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with sizes of their own, of which the last attend to the keys and values of earlier ones.

    The source of a layer is the last layer of the same type that has keys and values of its own.

    Raises:
        ConfigError: there is no such layer.
    """
    hf = model.hf
    own_sizes = {int(index): sizes for index, sizes in (hf.get("per_layer_config") or {}).items()}
    layer_types = hf.get("layer_types") or [FULL] * model.num_layers
    num_own = model.num_layers - (hf.get("num_kv_shared_layers") or 0)
    last_of = {layer_type: index for index, layer_type in enumerate(layer_types[: max(num_own, 0)])}
    missing = sorted(set(layer_types) - set(last_of))
    if missing:
        raise ConfigError(
            f"{model.name}: num_kv_shared_layers leaves no layer of type {missing[0]!r} with keys and values"
        )
    changed = []
    for index, (layer, layer_type) in enumerate(zip(layers, layer_types, strict=True)):
        assert isinstance(layer.mixer, AttentionSpec)
        assert layer.mlp is not None
        sizes = own_sizes.get(index, {})
        mixer = replace(
            layer.mixer,
            num_kv_heads=sizes.get("num_key_value_heads") or layer.mixer.num_kv_heads,
            head_dim=sizes.get("head_dim") or layer.mixer.head_dim,
            values_are_keys=bool(hf.get("attention_k_eq_v")) and layer_type == FULL,
        )
        mlp = replace(layer.mlp, intermediate_size=hf["layer_intermediate_sizes"][index])
        changed.append(
            LayerSpec(mixer, mlp, layer.has_experts, None if index < num_own else last_of[layer_type])
        )
    return changed


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the scale of embeddings."""
    return hf | {"embedding_multiplier": hf["hidden_size"] ** 0.5}


def _adapt_3n(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Gemma 3n, which lists the sizes of all feed-forward networks."""
    return _adapt(hf) | {
        "attention_multiplier": 1.0,
        "intermediate_size": max(hf["intermediate_size"]),
        "layer_intermediate_sizes": hf["intermediate_size"],
    }


def _read_3n(hf: dict[str, Any]) -> Gemma3n:
    return Gemma3n(
        PerLayerInputs(hf["hidden_size_per_layer_input"], hf["vocab_size_per_layer_input"]),
        hf["altup_num_inputs"],
        hf["altup_active_idx"],
        bool(hf["altup_correct_scale"]),
        hf["laurel_rank"],
        tuple(hf["activation_sparsity_pattern"]),
    )


def _adapt_4(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Gemma 4, whose layers that share keys and values may be twice as wide."""
    num_layers, width = hf["num_hidden_layers"], hf["intermediate_size"]
    num_own = num_layers - (hf.get("num_kv_shared_layers") or 0)
    wide = 2 * width if hf.get("use_double_wide_mlp") else width
    # "vision" concerns the tokens of images only.
    attention = hf.get("use_bidirectional_attention")
    return _adapt(hf) | {
        "attention_multiplier": 1.0,
        "layer_intermediate_sizes": [width if index < num_own else wide for index in range(num_layers)],
        "use_bidirectional_attention": None if attention == "vision" else attention,
    }


def _read_4(hf: dict[str, Any]) -> Gemma4:
    size = hf.get("hidden_size_per_layer_input")
    inputs = PerLayerInputs(size, hf["vocab_size_per_layer_input"]) if size else None
    return Gemma4(inputs, hf.get("pad_token_id") or 0)


GEMMA = Family(norms=Norms(offset=1.0), adapt=_adapt)
GEMMA_2 = Family(
    fields=FieldNames(activation="hidden_activation"), norms=replace(_SANDWICH, offset=1.0), adapt=_adapt
)
GEMMA_3 = replace(GEMMA_2, qk_norm=QkNorm("head"))
GEMMA_3N = replace(
    GEMMA_3, norms=_SANDWICH, adapt=_adapt_3n, change_layers=_change_layers, read_variant=_read_3n
)
GEMMA_4 = replace(
    GEMMA_3N,
    experts=ExpertFields(
        "num_experts", "moe_intermediate_size", "top_k_experts", flag="enable_moe_block", normalized=True
    ),
    adapt=_adapt_4,
    read_variant=_read_4,
)


def _to_bfloat16(value: float) -> float:
    """Return the nearest number with the 8 significant bits of bfloat16."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _adapt_recurrent(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of RecurrentGemma, whose attention has windows."""
    num_layers, kinds = hf["num_hidden_layers"], list(hf["block_types"])
    return hf | {
        "embedding_multiplier": _to_bfloat16(hf["hidden_size"] ** 0.5),
        "final_logit_softcapping": hf["logits_soft_cap"],
        "intermediate_size": hf["intermediate_size"] // 2,
        "is_recurrent": [kinds[index % len(kinds)] == "recurrent" for index in range(num_layers)],
        "layer_types": [SLIDING] * num_layers,
        "mlp_bias": True,
        "sliding_window": hf["attention_window_size"],
    }


def _change_recurrent_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with recurrent blocks in place of the attention of some, whose output has a bias."""
    hf, changed = model.hf, []
    recurrent = RgLruSpec(hf["num_attention_heads"], hf["lru_width"], hf["conv1d_width"])
    for layer, is_recurrent in zip(layers, hf["is_recurrent"], strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        attention = replace(layer.mixer, output_bias=True)
        changed.append(replace(layer, mixer=recurrent if is_recurrent else attention))
    return changed


RECURRENT_GEMMA = Family(
    fields=FieldNames(activation="hidden_activation"),
    norms=Norms("temporal_pre_norm", before_mlp="channel_pre_norm", offset=1.0),
    names=Names(attention="temporal_block", mlp="mlp_block", last_norm="model.final_norm"),
    adapt=_adapt_recurrent,
    change_layers=_change_recurrent_layers,
)
