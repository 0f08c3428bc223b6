"""The models that are compared with transformers: model types, their variants, and the numbers of ranks."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

# As published: `dynamic` with a fixed base.
HUNYUAN_ROPE = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "alpha": 1000.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64}
# Model type, or type and variant |-> overrides of its configuration.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-two-kv-heads": {"num_key_value_heads": 2, "intermediate_size": 130},
    "llama-tied-biased": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 8,
    },
    "llama-rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-rope-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama-rope-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
    "mistral": {},
    "mistral-window": {"sliding_window": 11},
    "ministral": {
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "mixtral": {"sliding_window": 24},
    "mixtral-fused": {"checkpoint": {"save_original_format": False}},
    "phimoe": {
        "num_local_experts": 4,
        "lm_head_bias": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0 + 0.25 * pair for pair in range(8)],
            "long_factor": [4.0] * 8,
            "short_mscale": 1.25,
            "long_mscale": 1.5,
            "original_max_position_embeddings": 256,
        },
        "original_max_position_embeddings": 256,
    },
    "phimoe-fused": {"num_local_experts": 4, "checkpoint": {"save_original_format": False}},
    "gpt_oss": {},
    "mimo_v2_flash": {},
    "mimo_v2_flash-one-kv-head": {"num_key_value_heads": 1, "attention_bias": True, "v_head_dim": 12},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "qwen3": {},
    "qwen3-odd-vocabulary": {"vocab_size": 387, "num_key_value_heads": 8},
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_moe-fused": {"decoder_sparse_step": 2, "checkpoint": {"save_original_format": False}},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {"num_key_value_heads": 8},
    "phi3-longrope": {
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 4.0],
        },
        "original_max_position_embeddings": 256,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 24},
    "olmo3-yarn": {
        "sliding_window": 24,
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "granite": {},
    "deepseek_v2": {},
    "deepseek_v2-yarn": {
        "topk_method": "greedy",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3": {},
    "deepseek_v3-fused": {"n_group": 1, "topk_group": 1, "checkpoint": {"save_original_format": False}},
    "deepseek_v3-halves": {"rope_interleave": False, "q_lora_rank": None},
    "youtu": {
        "num_key_value_heads": 8,
        "kv_lora_rank": 48,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
    },
    "deepseek_v32": {},
    "deepseek_v32-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "glm_moe_dsa": {},
    "glm4_moe_lite": {},
    "glm4_moe_lite-dense": {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None},
    "longcat_flash": {},
    "longcat_flash-one-pair": {"num_layers": 1, "n_routed_experts": 5, "moe_topk": 2, "zero_expert_num": 0},
    "mistral4": {},
    "mistral4-dense": {"first_k_dense_replace": 3, "q_lora_rank": None, "rope_interleave": False},
    "minicpm3": {},
    "minicpm3-tied": {"tie_word_embeddings": True, "q_lora_rank": None, "scale_emb": 1, "dim_model_base": 32},
    "axk1": {},
    "axk1-current-names": {"checkpoint": {"save_original_format": False}},
    "axk2": {},
    "axk2-one-group": {"n_group": None, "topk_group": None, "index_topk": 64},
    "hy_v4": {},
    "hy_v4-dense": {
        "indexer_types": ["full"] * 3,
        "index_topk": 64,
        "mlp_layer_types": ["sparse", "dense", "dense"],
        "hc_mult": 2,
        "hc_magnitude": 1.5,
        "checkpoint": {"save_original_format": False},
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm": {},
    "glm4": {"attention_bias": True},
    "glm4_moe": {"attention_bias": True},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "exaone4": {},
    "exaone4-full": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ernie4_5": {},
    "ernie4_5-biased": {"use_bias": True},
    "ernie4_5_moe": {"use_bias": False},
    "ernie4_5_moe-biased": {"use_bias": True},
    "olmoe": {"norm_topk_prob": True},
    "seed_oss": {"attention_bias": True},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_dense-alpha": {"rope_parameters": HUNYUAN_ROPE},
    "cohere2": {"sliding_window": 11},
    "cohere": {},
    "cohere-norms": {"use_qk_norm": True},
    "nemotron": {},
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": True},
    "stablelm-parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    "llama4_text": {},
    "llama4_text-every-layer": {
        "moe_layers": None,
        "use_qk_norm": False,
        "num_experts_per_tok": 1,
    },
    "gptj": {},
    "gemma3n_text": {},
    "gemma4_text": {},
    "gemma4_text-experts": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "gemma4_text-plain": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": False,
    },
    "gemma4_unified_text": {},
    # Served with the modules of transformers.
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "bloom": {},
    "falcon": {},
    "falcon-multi-query": {"new_decoder_architecture": False, "multi_query": True},
    "falcon-linear-biases": {
        "new_decoder_architecture": False,
        "multi_query": False,
        "num_kv_heads": 8,
        "alibi": True,
    },
    "olmo": {},
    "gemma": {},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "bitnet": {"head_dim": 8},
    "cwm": {
        "bos_token_id": 0,
        "sliding_window": 11,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "flint": {"sliding_window": 11},
    "granite_swa": {"sliding_window": 11},
    "granitemoe_swa": _LOCAL_EXPERTS | {"sliding_window": 11},
    "afmoe": _EXPERTS | {"num_dense_layers": 1, "sliding_window": 11},
    "apertus": {},
    "arcee": {},
    "cohere2_moe": _EXPERTS | {"sliding_window": 11},
    "dots1": _ROUTED_EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "exaone_moe": _EXPERTS | {"sliding_window": 11},
    "gpt_bigcode": {},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoeshared": _LOCAL_EXPERTS | {"shared_intermediate_size": 64},
    "helium": {"head_dim": 8},
    "hy_v3": _EXPERTS,
    "hyperclovax": {},
    "jais2": {},
    "laguna": _EXPERTS,
    "laguna-current-names": _EXPERTS | {"checkpoint": {"save_original_format": False}},
    "mellum": _EXPERTS,
    "mellum-unaligned": _EXPERTS | {"moe_intermediate_size": 50},
    "nanochat": {},
    "persimmon": {},
    "phi": {},
    "solar_open": _ROUTED_EXPERTS,
    "vaultgemma": {},
    "beam": _EXPERTS | {"n_group": 1, "topk_group": 1, "sliding_window": 11},
    "ctrl": {},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "kolibri1": _LOCAL_EXPERTS
    | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "sliding_window": 11},
    "modernbert_decoder": {
        "sliding_window": 11,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "cls_token_id": 0,
        "sep_token_id": 0,
    },
    "apertus1p5_text": {},
    "codegen": {"bos_token_id": 0, "eos_token_id": 0},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hunyuan_v1_moe-alpha": {"num_experts": 4, "moe_topk": [2, 2, 2], "rope_parameters": HUNYUAN_ROPE},
    "qwen2_moe": _SHARED_EXPERTS,
    "qwen2_moe-unbiased": _SHARED_EXPERTS | {"qkv_bias": False},
}
# No tensor-parallel plan, or one with styles besides columns and rows.
ONE_RANK_ONLY = {
    *("afmoe", "cohere2_moe", "dots1", "exaone_moe", "gpt_bigcode", "granitemoe", "granitemoeshared"),
    *("hy_v3", "laguna", "laguna-current-names", "mellum", "mellum-unaligned", "persimmon", "solar_open"),
    *("aria_text", "bitnet", "flint", "granite_swa", "granitemoe_swa"),
    *("beam", "ctrl", "dbrx", "kolibri1", "modernbert_decoder"),
    "flex_olmo",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "falcon-multi-query",
    "falcon-linear-biases",
}


# One kind for each layout of the cache, for experts and for the modules of transformers.
TYPICAL = {
    *(
        "llama",
        "gemma2",
        "gpt_oss",
        "llama4_text",
        "gemma3n_text",
        "gemma4_text",
        "deepseek_v3",
        "deepseek_v32",
    ),
    "qwen3_moe",
    "gpt_neox",
}


# Kinds that not all supported versions of transformers have |-> architecture, served since transformers 5.24.
SINCE_5_24 = {"apertus1p5_text": "Apertus1p5TextForCausalLM", "codegen": "CodeGenForCausalLM"}


# Kinds that transformers has as text models within others only |-> architecture.
TEXT_ONLY = {"mistral4": "Mistral4ForCausalLM", "glm5_next_text": "Glm5NextForCausalLM"}


def register_text_models() -> None:
    """Let transformers' AutoModelForCausalLM make the kinds of TEXT_ONLY."""
    from text_models import causal_class

    for kind, architecture in TEXT_ONLY.items():
        config_class = transformers.CONFIG_MAPPING[kind]
        model_class = getattr(transformers, architecture, None) or causal_class(architecture, config_class)
        transformers.AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def is_installed(kind: str) -> bool:
    """Return whether the installed transformers has a kind with an attention that quire can replace."""
    return kind not in SINCE_5_24 or Version(transformers.__version__) >= Version("5.24")


def model_type_of(kind: str) -> str:
    """Return transformers' model type of a kind."""
    family = kind.split("-")[0]
    return "modernbert-decoder" if family == "modernbert_decoder" else family


def ranks_for(kind: str) -> tuple[int, ...]:
    """Return 1, 2 and 4 ranks for a family, and fewer for its variants."""
    if kind in ONE_RANK_ONLY or "-rope-" in kind:
        return (1,)
    return (4,) if "-" in kind else (1, 2, 4)
