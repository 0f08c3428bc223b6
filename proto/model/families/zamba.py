"""Zamba and Zamba 2: layers of Mamba, before some of which a block of attention and feed-forward network is computed.

The blocks are few, and take turns; in Zamba 2 each use of one has low-rank adapters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import ModelConfig
from ..attention import FULL, AttentionSpec
from ..family import Family, FieldNames
from ..mamba1 import Mamba1Spec
from ..mamba2 import Mamba2Spec
from ..spec import LayerSpec, Names, Norms

# Of Mamba's norm, which the configuration does not state.
_MAMBA_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Zamba:
    """The shared blocks of Zamba and Zamba 2 (Glorioso et al., 2024).

    Attributes:
        sources: layer with a block |-> layer that the checkpoint stores the block with.
        intermediate_size: of the feed-forward network.
        block_name: of a block within a layer of the checkpoint.
        fused_gate_up: checkpoints store gate and up of the feed-forward network as one ``gate_up_proj``.
        bias: of the feed-forward network.
        adapter_rank: of the adapters of the feed-forward network, and of attention if `adapts_attention`; 0 for none.
    """

    sources: dict[int, int]
    intermediate_size: int
    block_name: str
    fused_gate_up: bool = False
    bias: bool = False
    adapter_rank: int = 0
    adapts_attention: bool = False


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose attention reads twice as many numbers as the hidden state has."""
    for field, supported in (("hidden_act", "gelu"), ("hidden_mamba_act", "silu")):
        if (activation := hf.get(field, supported)) != supported:
            raise ValueError(f"{field} {activation!r:.100} of Zamba is not supported, only {supported!r}")
    num_layers = hf["num_hidden_layers"]
    return hf | {
        "kinds": hf["layers_block_type"],
        "hidden_act": "silu",  # of Mamba; the feed-forward networks have their own
        "layer_types": [FULL] * num_layers,
        "no_rope_layers": [bool(hf.get("use_mem_rope"))] * num_layers,
        "query_pre_attn_scalar": hf["attention_head_dim"] / 2,
    }


def _change_zamba_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers of Mamba with heads, of which some have attention before it."""
    hf = model.hf
    mixer = Mamba1Spec(
        int(hf["mamba_expand"] * hf["hidden_size"]),
        hf["mamba_d_state"],
        int(hf["mamba_dt_rank"]),
        hf["mamba_d_conv"],
        0.0,
        conv_bias=bool(hf["mamba_conv_bias"]),
        bias=bool(hf["mamba_proj_bias"]),
        num_heads=hf["n_mamba_heads"],
    )
    if mixer.num_heads < 1 or mixer.num_channels % mixer.num_heads:
        raise ValueError(
            f"n_mamba_heads is {mixer.num_heads}, must divide the {mixer.num_channels} channels of Mamba"
        )
    return _with_blocks(model, layers, mixer)


def _with_blocks(
    model: ModelConfig, layers: Sequence[LayerSpec], mixer: Mamba1Spec | Mamba2Spec
) -> list[LayerSpec]:
    """Return layers that are a mixer, some of them with attention before it."""
    changed = []
    for layer, kind in zip(layers, model.hf["kinds"], strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        own = replace(mixer, attention=layer.mixer) if kind == "hybrid" else mixer
        changed.append(replace(layer, mixer=own, mixer_name="mamba", mlp=None))
    return changed


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers of Mamba 2, of which some have attention before it."""
    hf = model.hf
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
    return _with_blocks(model, layers, mixer)


def _sources(hf: dict[str, Any], num_blocks: int) -> dict[int, int]:
    """Return Zamba.sources of a model with some blocks, which take turns."""
    own = [index for index, kind in enumerate(hf["kinds"]) if kind == "hybrid"]
    if not hf.get("tie_word_embeddings"):
        num_blocks = len(own)  # transformers shares no weights then
    return {layer: own[number % num_blocks] for number, layer in enumerate(own)}


def _read_variant(hf: dict[str, Any]) -> Zamba:
    return Zamba(
        _sources(hf, hf["num_mem_blocks"]),
        hf["intermediate_size"],
        "shared_transformer",
        fused_gate_up=True,
        bias=bool(hf["add_bias_linear"]),
        adapter_rank=hf["adapter_rank"],
        adapts_attention=bool(hf["use_shared_attention_adapter"]),
    )


ZAMBA_2 = Family(
    fields=FieldNames(qkv_bias="", output_bias=None, mlp_bias="add_bias_linear"),
    norms=Norms("input_layernorm", before_mlp=None),
    names=Names(last_norm="model.final_layernorm"),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=_read_variant,
)
ZAMBA = replace(
    ZAMBA_2,
    fields=FieldNames(qkv_bias="", output_bias=None, mlp_bias=""),
    change_layers=_change_zamba_layers,
    read_variant=lambda hf: Zamba(_sources(hf, 1), hf["intermediate_size"], "shared_transf"),
)
