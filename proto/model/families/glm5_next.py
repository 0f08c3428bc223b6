"""GLM-5 Next (GLM-5.3-Flash, 2026): Kimi delta attention, and latent attention to pools of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..config_fields import required
from ..family import Family
from ..mla import UNROTATED, MlaSpec
from ..pooled_mla import PooledMlaSpec
from ..spec import LayerSpec, Names
from ..streams import Streams
from .latent_attention import DEEPSEEK_EXPERTS
from .linear_attention import FORGET_GATE, LINEAR, read_delta

_INDEXED = "indexed_attention"


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that says which layers are linear; these name no indexer of others."""
    kinds, indexers = hf["layer_types"], hf["indexer_types"]
    return hf | {
        "is_linear": [kind == LINEAR for kind in kinds],
        "indexer_types": [
            "full" if kind == LINEAR else own for kind, own in zip(kinds, indexers, strict=False)
        ],
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    hf, eps = model.hf, float(model.hf["rms_norm_eps"])
    _check_layers(model)
    delta = read_delta(model, is_low_rank=True, decay_bound=hf["linear_lower_bound"])
    limit, pool_len, changed = float(hf["swiglu_limit"]), _read_pool_len(model), list[LayerSpec]()
    for layer, is_linear in zip(layers, hf["is_linear"], strict=True):
        own = layer.mixer
        assert isinstance(own, MlaSpec)
        assert own.indexer is not None
        assert layer.mlp is not None
        mixer = replace(own, rope=UNROTATED, norm_eps=eps, num_index_keys=0)
        mixer = replace(mixer, indexer=replace(own.indexer, pool_len=pool_len))
        if own.has_indexer:
            mixer = PooledMlaSpec(**{field.name: getattr(mixer, field.name) for field in fields(mixer)})
        mlp = replace(layer.mlp, clamp=(1.0, limit, 0.0))
        changed.append(replace(layer, mixer=delta if is_linear else mixer, mlp=mlp))
    return changed


def _check_layers(model: ModelConfig) -> None:
    """Raise ConfigError unless layers are of known types, and follow the one whose indexer they share."""
    kinds, indexers = model.hf["layer_types"], model.hf["indexer_types"]
    if len(kinds) != model.num_layers or set(kinds) - {LINEAR, _INDEXED}:
        raise ConfigError(
            f"{model.name}: layer_types is {kinds!r:.200}, must name {LINEAR!r} or {_INDEXED!r} for each of "
            f"{model.num_layers} layers"
        )
    for index, (before, own) in enumerate(pairwise(zip(kinds, indexers, strict=False)), 1):
        if own == (_INDEXED, "shared") and before != (_INDEXED, "full"):
            raise ConfigError(
                f"{model.name}: layer {index} shares an indexer (indexer_types), but the layer before it has none of "
                "its own"
            )


def _read_pool_len(model: ModelConfig) -> int:
    """Return the tokens of a pool. Raises ConfigError if the indexer is not supported."""
    hf, pool_len = model.hf, required(model, "index_kpool")
    if not hf["index_kpool_always_select_tail"]:
        raise ConfigError(
            f"{model.name}: attention to whole pools alone (index_kpool_always_select_tail: false) is not supported"
        )
    if pool_len < 2 or required(model, "index_topk") % pool_len:
        raise ConfigError(
            f"{model.name}: index_kpool is {pool_len}, must be at least 2 and divide index_topk, {hf['index_topk']}"
        )
    if required(model, "index_head_dim") > required(model, "kv_lora_rank"):
        raise ConfigError(
            f"{model.name}: index_head_dim is {hf['index_head_dim']}, must be at most kv_lora_rank, "
            f"{hf['kv_lora_rank']}"
        )
    return int(pool_len)


def _unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Return the layer behind the last one, which predicts further tokens; transformers does not read it, either."""
    return (f"model.layers.{hf['num_hidden_layers']}.",)


GLM_5_NEXT = Family(
    qkv_bias=False,
    is_latent=True,
    indexer_interleaved=False,
    count_index_keys=lambda hf: 0,
    experts=replace(DEEPSEEK_EXPERTS, routing="all_clamped_sigmoid"),
    names=Names(
        renames=(FORGET_GATE, (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2")),
    ),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=lambda hf: Streams(
        hf["hc_mult"],
        hf["hc_eps"],
        2.0,
        num_iterations=hf["hc_sinkhorn_iters"],
        mixes=True,
        averages=True,
    ),
    read_unused=_unused,
)
