"""Qwen4 (2026): the layers of Qwen3.5, an indexer of blocks, gated streams of the residual, and n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, AttentionSpec, PooledIndexerSpec
from ..config_fields import required
from ..gated_delta import GatedDeltaSpec
from ..ngrams import NgramSpec
from ..pooled import PooledKeysSpec
from ..spec import LayerSpec, Norms
from ..streams import GatedStreams
from .gated_delta_nets import QWEN_3_5_MOE, adapt_delta_nets

# Names of the layers with attention, in published configurations and in those of transformers.
_ATTENTION = ("qwen_sparse_attention", "indexed_attention")
_INDEXER_FIELDS = (
    *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim"),
    *("indexer_budget", "indexer_compress_ratio"),
)


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose layers with attention are of the kind that the other families have."""
    kinds = [FULL if kind in _ATTENTION else kind for kind in hf["layer_types"]]
    return adapt_delta_nets(hf | {"layer_types": kinds})


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """Return the layers of Qwen3.5 with their indexers, gates of another kind and n-grams."""
    assert QWEN_3_5_MOE.change_layers is not None
    layers = QWEN_3_5_MOE.change_layers(model, layers)
    hf, indexer = model.hf, _read_indexer(model)
    gate = hf.get("output_gate_type") or hf["hidden_act"]
    if gate not in ("silu", "sigmoid"):
        raise ConfigError(
            f"{model.name}: output_gate_type {gate!r:.100} is not supported, only 'silu', 'sigmoid'"
        )
    with_ngrams = sorted(set(hf.get("ple_layer_ids") or ()))
    if unknown := [each for each in with_ngrams if not 1 <= each <= len(layers)]:
        raise ConfigError(
            f"{model.name}: ple_layer_ids has {unknown[0]!r:.100}, but there are {len(layers)} layers"
        )
    changed = []
    for number, layer in enumerate(layers, 1):
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaSpec):
            ngrams = _read_ngrams(model, with_ngrams.index(number)) if number in with_ngrams else None
            changed.append(replace(layer, mixer=replace(mixer, gate=gate, ngrams=ngrams)))
            continue
        if number in with_ngrams:
            raise ConfigError(
                f"{model.name}: ple_layer_ids has {number}, a layer of attention; n-grams are supported before gated "
                "delta nets"
            )
        assert isinstance(mixer, AttentionSpec)
        if indexer is not None:
            rotated = _num_rotated(model)
            changed.append(replace(layer, mixer=PooledKeysSpec(replace(mixer, indexer=indexer), rotated)))
        else:
            changed.append(layer)
    return changed


def _num_rotated(model: ModelConfig) -> int:
    share = (model.hf.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    return int(model.head_dim * share)


def _read_indexer(model: ModelConfig) -> PooledIndexerSpec | None:
    """Return the indexer of the layers with attention; None if these attend to all tokens.

    Raises:
        ConfigError: a size is missing or not supported.
    """
    if all(model.hf.get(field) is None for field in _INDEXER_FIELDS):
        return None
    num_heads, num_kv_heads, head_dim, budget, block_len = (
        required(model, field) for field in _INDEXER_FIELDS
    )
    if num_kv_heads != 1:
        raise ConfigError(f"{model.name}: indexer_kv_heads is {num_kv_heads}, must be 1")
    if block_len < 2 or budget < block_len or budget % block_len:
        raise ConfigError(
            f"{model.name}: indexer_budget is {budget} and indexer_compress_ratio {block_len}; the latter must be at "
            "least 2, and the first a multiple of it"
        )
    if head_dim < _num_rotated(model) or num_heads < 1:
        raise ConfigError(
            f"{model.name}: indexer_head_dim and indexer_n_heads are {head_dim} and {num_heads}, must be at least "
            f"{_num_rotated(model)}, as many as are rotated of a head, and 1"
        )
    return PooledIndexerSpec(num_heads, head_dim, block_len, budget // block_len)


def _read_ngrams(model: ModelConfig, index: int) -> NgramSpec:
    hf = model.hf
    separator = hf.get("eos_token_id")
    if isinstance(separator, list):
        separator = separator[0] if separator else None
    if separator is None:
        raise ConfigError(f"{model.name}: its config.json lacks 'eos_token_id', which separates n-grams")
    return NgramSpec(
        index=index,
        size=hf["ngram_size"],
        num_hashes=hf["heads_per_ngram"],
        min_rows=hf["ngram_vocab_size_base"],
        row_multiple=hf["make_ngram_vocab_size_divisible_by"],
        embed_dim=hf.get("ple_embed_dim") or hf["hidden_size"],
        seed=hf["seed"],
        vocab_size=model.vocab_size,
        separator=separator,
        width=hf["ple_conv_kernel_size"],
        num_streams=hf["hc_count"],
        hidden_size=hf["hidden_size"],
    )


assert QWEN_3_5_MOE.experts is not None
QWEN_4 = replace(
    QWEN_3_5_MOE,
    norms=Norms(before_attention=None, before_mlp=None, offset=1.0),
    experts=replace(QWEN_3_5_MOE.experts, normalized=None),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=lambda hf: GatedStreams(hf["hc_count"], hf["hc_lowrank"]),
    unused_prefixes=("mtp.", "model.mtp."),
)
