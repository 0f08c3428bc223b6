"""Gemma 3n: several streams of the residual, inputs of each layer, and sparse activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config import ModelConfig
from ..attention import QkNorm
from ..family import Family
from ..spec import LayerSpec
from .gemma import FIELDS, SANDWICH, PerLayerInputs, share_kv


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


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Gemma 3n, which lists the sizes of all feed-forward networks."""
    return hf | {
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
        "attention_multiplier": 1.0,
        "intermediate_size": max(hf["intermediate_size"]),
        "layer_intermediate_sizes": hf["intermediate_size"],
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    return share_kv(model, layers, model.hf["layer_intermediate_sizes"])


def _read_variant(hf: dict[str, Any]) -> Gemma3n:
    return Gemma3n(
        PerLayerInputs(hf["hidden_size_per_layer_input"], hf["vocab_size_per_layer_input"]),
        hf["altup_num_inputs"],
        hf["altup_active_idx"],
        bool(hf["altup_correct_scale"]),
        hf["laurel_rank"],
        tuple(hf["activation_sparsity_pattern"]),
    )


FAMILY = Family(
    fields=FIELDS,
    qk_norm=QkNorm("head"),
    norms=SANDWICH,
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=_read_variant,
)
