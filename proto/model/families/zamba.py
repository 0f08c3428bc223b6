"""Zamba 2: layers of Mamba 2, before some of which a block of attention and feed-forward network is computed.

The blocks are few, and take turns; each use of one has low-rank adapters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL, AttentionSpec
from ..family import Family, FieldNames
from ..mamba2 import Mamba2Spec
from ..spec import LayerSpec, Names, Norms

# Of Mamba's norm, which the configuration does not state.
_MAMBA_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Zamba2:
    """The shared blocks of Zamba 2 (Glorioso et al., 2024).

    Attributes:
        sources: layer with a block |-> layer that the checkpoint stores the block with.
        adapter_rank: of the adapters of the feed-forward network, and of attention if `adapts_attention`.
        intermediate_size: of the feed-forward network.
        bias: of the feed-forward network.
    """

    sources: dict[int, int]
    adapter_rank: int
    adapts_attention: bool
    intermediate_size: int
    bias: bool


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose attention reads twice as many numbers as the hidden state has."""
    if hf["hidden_act"] != "gelu":
        raise ValueError(f"hidden_act {hf['hidden_act']!r:.100} of Zamba 2 is not supported, only 'gelu'")
    num_layers = hf["num_hidden_layers"]
    return hf | {
        "kinds": hf["layers_block_type"],
        "hidden_act": "silu",  # of Mamba; the feed-forward networks have their own
        "layer_types": [FULL] * num_layers,
        "no_rope_layers": [bool(hf["use_mem_rope"])] * num_layers,
        "query_pre_attn_scalar": hf["attention_head_dim"] / 2,
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers of Mamba 2, of which some have attention before it."""
    hf, changed = model.hf, []
    mixer = Mamba2Spec(
        hf["n_mamba_heads"],
        hf["mamba_headdim"],
        hf["mamba_ngroups"],
        hf["mamba_d_state"],
        hf["mamba_d_conv"],
        _MAMBA_NORM_EPS,
        bias=bool(hf["add_bias_linear"]),
        output_bias=bool(hf["add_bias_linear"]),
    )
    for layer, kind in zip(layers, hf["kinds"], strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        own = replace(mixer, attention=layer.mixer) if kind == "hybrid" else mixer
        changed.append(replace(layer, mixer=own, mixer_name="mamba", mlp=None))
    return changed


def _read_variant(hf: dict[str, Any]) -> Zamba2:
    own = [index for index, kind in enumerate(hf["kinds"]) if kind == "hybrid"]
    return Zamba2(
        {layer: own[number % hf["num_mem_blocks"]] for number, layer in enumerate(own)},
        hf["adapter_rank"],
        bool(hf["use_shared_attention_adapter"]),
        hf["intermediate_size"],
        bool(hf["add_bias_linear"]),
    )


ZAMBA_2 = Family(
    fields=FieldNames(qkv_bias="", output_bias=None, mlp_bias="add_bias_linear"),
    norms=Norms("input_layernorm", before_mlp=None),
    names=Names(last_norm="model.final_layernorm"),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=_read_variant,
)
