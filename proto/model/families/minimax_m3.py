"""MiniMax-M3: attention to blocks of keys that an indexer chooses for each KV head, and the activation of gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, AttentionSpec, BlockIndexerSpec, QkNorm
from ..config_fields import required
from ..experts import ExpertFields
from ..family import Family
from ..spec import LayerSpec, Names, Norms

SPARSE = "minimax_m3_sparse"


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose layers are all of the kind that the other families have."""
    kinds = hf.get("layer_types") or [FULL] * hf["num_hidden_layers"]
    return hf | {
        "layer_types": [FULL if kind == SPARSE else kind for kind in kinds],
        "sparse_layers": [kind == SPARSE for kind in kinds],
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    hf = model.hf
    indexer = _read_indexer(model) if any(hf["sparse_layers"]) else None
    clamp = float(hf["swiglu_alpha"]), float(hf["swiglu_limit"]), 1.0
    changed = []
    for layer, is_sparse in zip(layers, hf["sparse_layers"], strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        assert layer.mlp is not None
        mixer = replace(layer.mixer, indexer=indexer if is_sparse else None)
        mlp = replace(layer.mlp, intermediate_size=required(model, "dense_intermediate_size"), clamp=clamp)
        changed.append(replace(layer, mixer=mixer, mlp=mlp))
    return changed


def _read_indexer(model: ModelConfig) -> BlockIndexerSpec:
    """Return the indexer of the layers that have one. Raises ConfigError if a size is not supported."""
    num_heads = required(model, "index_n_heads")
    if num_heads != model.num_kv_heads:
        raise ConfigError(
            f"{model.name}: index_n_heads is {num_heads}, must be the number of KV heads, {model.num_kv_heads}"
        )
    indexer = BlockIndexerSpec(
        required(model, "index_head_dim"),
        required(model, "index_block_size"),
        required(model, "index_topk_blocks"),
        required(model, "index_local_blocks"),
    )
    share = (model.hf.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    rotated = int(model.head_dim * share)
    if indexer.head_dim < rotated or indexer.head_dim % 2:
        raise ConfigError(
            f"{model.name}: index_head_dim is {indexer.head_dim}, must be even and at least {rotated}: as "
            "many are rotated of a head"
        )
    if not 0 <= indexer.num_local <= indexer.top_k or indexer.top_k < 1 or indexer.block_len < 1:
        raise ConfigError(
            f"{model.name}: index_local_blocks, index_topk_blocks and index_block_size are {indexer.num_local}, "
            f"{indexer.top_k} and {indexer.block_len}; the first must be 0 to the second, and the others at least 1"
        )
    return indexer


M3 = Family(
    qkv_bias=False,
    qk_norm=QkNorm("head"),
    norms=Norms(offset=1.0),
    experts=ExpertFields(
        "num_local_experts",
        "intermediate_size",
        shared_size="shared_intermediate_size",
        normalized=True,
        routing="offset_sigmoid",
    ),
    names=Names(renames=((r"\.self_attn\.index_(q|k)_(proj|norm)\.", r".self_attn.indexer.\1_\2."),)),
    adapt=_adapt,
    change_layers=_change_layers,
    unused_prefixes=("mtp.", "model.mtp."),
)
