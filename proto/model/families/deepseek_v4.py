"""DeepSeek-V4 (2026): attention to compressed tokens, a residual of several streams, experts by token id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..attention import FULL, SLIDING
from ..compressed import CompressedSpec, EntryIndexerSpec, SharedKvSpec
from ..experts import ExpertFields
from ..family import Family
from ..spec import LayerSpec, Names
from ..streams import Streams

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the usual names; the rotations are those of the layers with and without entries."""
    rope, num_layers = hf["rope_parameters"], hf["num_hidden_layers"]
    return hf | {
        "kinds": hf["layer_types"],
        "layer_types": [FULL] * num_layers,
        "intermediate_size": hf["moe_intermediate_size"],
        "rope_parameters": {SLIDING: rope["main"], FULL: rope["compress"]},
        "mlp_layer_types": ["sparse"] * num_layers,
        "norm_topk_prob": True,
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return layers with the attention of their kind."""
    return [
        LayerSpec(_read_mixer(model, kind), None, has_experts=True)
        for _, kind in zip(layers, model.hf["kinds"], strict=True)
    ]


def _read_mixer(model: ModelConfig, kind: str) -> SharedKvSpec:
    hf = model.hf
    fields: dict[str, Any] = {
        "num_heads": model.num_heads,
        "head_dim": model.head_dim,
        "query_rank": hf["q_lora_rank"],
        "num_groups": hf["o_groups"],
        "group_rank": hf["o_lora_rank"],
        "window": hf["sliding_window"],
    }
    if kind == SLIDING:
        return SharedKvSpec(**fields, rope=SLIDING)
    if kind not in (_SPARSE, _HEAVY):
        raise ConfigError(f"{model.name}: layers of type {kind!r:.100} are not supported")
    rate, indexer = hf["compress_rates"][kind], None
    if rate < 2:
        raise ConfigError(f"{model.name}: compress_rates of {kind} is {rate}, must be at least 2")
    if kind == _SPARSE:
        indexer = EntryIndexerSpec(hf["index_n_heads"], hf["index_head_dim"], hf["index_topk"])
        if not 1 <= indexer.head_dim <= model.head_dim:
            raise ConfigError(
                f"{model.name}: index_head_dim is {indexer.head_dim}, must be from 1 to head_dim, {model.head_dim}"
            )
    return CompressedSpec(**fields, rate=rate, overlaps=kind == _SPARSE, indexer=indexer)


# Names in published checkpoints |-> those of transformers.
_RENAMES = (
    (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"^(embed_tokens|layers|norm|hc_head)\.", r"model.\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.(compressor|indexer|self_attn)\.norm\.", r".\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
V4 = Family(
    qkv_bias=False,
    cached_field="head_dim",
    experts=ExpertFields("n_routed_experts", "moe_intermediate_size", routing="hashed"),
    names=Names(renames=_RENAMES),
    adapt=_adapt,
    change_layers=_change_layers,
    read_variant=lambda hf: Streams(
        hf["hc_mult"], hf["hc_eps"], 2.0, num_iterations=hf["hc_sinkhorn_iters"], mixes=True
    ),
    unused_prefixes=("mtp.", "model.mtp."),
)
