"""The models with states that are compared with transformers, and what their configurations have."""

from __future__ import annotations

from typing import Any

_LFM = {"conv_L_cache": 3, "norm_eps": 1e-5, "tie_word_embeddings": True}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
}
_MAMBA = {"state_size": 8, "time_step_rank": 5, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5}
_JAMBA = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 5,
}
_KIMI = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
_MINIMAX = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 8,
}
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_RECURRENT_GEMMA = {
    "attention_window_size": 9,
    "num_key_value_heads": 1,
    "block_types": ["recurrent", "attention"],
    "num_attention_heads": 4,
}
_ZAMBA_2 = {
    "tie_word_embeddings": True,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "mamba_d_state": 16,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "adapter_rank": 6,
    "use_mem_rope": True,
    "chunk_size": 8,
    "num_key_value_heads": 4,
}
_DEEPSEEK_V4 = {
    "num_key_value_heads": 1,
    "head_dim": 24,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 40,
    "o_groups": 4,
    "o_lora_rank": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "sliding_window": 9,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.5,
    "tie_word_embeddings": False,
}
_GLM5_NEXT = {
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_kpool": 4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.5,
}
_ZAYA = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 48,
    "num_experts": 5,
    "num_experts_per_tok": 1,
    "router_hidden_size": 24,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "sliding_window": 9,
    "tie_word_embeddings": True,
}
_ZAMBA = {
    "tie_word_embeddings": True,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "mamba_d_state": 8,
    "mamba_dt_rank": 5,
    "num_key_value_heads": 4,
}
_QWEN4 = (
    _DELTA
    | _EXPERTS
    | {
        "output_gate_type": "sigmoid",
        "hc_count": 3,
        "hc_lowrank": 20,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 20,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 48,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
    }
)
# Model type, or type and variant |-> overrides of its configuration.
STATE_KINDS: dict[str, dict[str, Any]] = {
    "lfm2": _LFM | {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2-wide": _LFM
    | {
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_L_cache": 5,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": _LFM
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": _LFM
    | {
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "conv_L_cache": 7,
        "sliding_window": 9,
    },
    "lfm3-plain": _LFM
    | {
        "layer_types": ["sliding_attention", "conv", "full_attention"],
        "conv_L_cache": 4,
        "sliding_window": 9,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
    },
    "qwen3_next": _DELTA | _EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_next-odd": _DELTA
    | _EXPERTS
    | {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 3,
        "norm_topk_prob": False,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_text-one-key-head": _DELTA
    | {"linear_num_key_heads": 1, "linear_num_value_heads": 8, "layer_types": ["linear_attention"] * 3},
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp_text-no-ngrams": _QWEN4
    | {
        "ple_layer_ids": None,
        "output_gate_type": None,
        "hc_count": 2,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "indexer_compress_ratio": 3,
        "indexer_budget": 9,
        "num_key_value_heads": 2,
        "norm_topk_prob": False,
    },
    "qwen4_exp_text-two-tables": _QWEN4
    | {
        "ple_layer_ids": [3, 1],
        "ple_embed_dim": 60,
        "ple_conv_kernel_size": 3,
        "ngram_size": 4,
        "split_ngram_parts": 6,
        "make_ngram_vocab_size_divisible_by": 6,
        "layer_types": ["linear_attention", "qwen_sparse_attention", "linear_attention"],
        "indexer_compress_ratio": 8,
        "indexer_budget": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "qwen4_exp_text-all-tokens": _QWEN4
    | {
        "indexer_budget": 512,
        "indexer_compress_ratio": 2,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 3,
        "ngram_size": 2,
        "heads_per_ngram": 3,
        "num_attention_heads": 4,
        "head_dim": 20,
        "num_key_value_heads": 4,
    },
    "qwen4_exp_text-long-blocks": _QWEN4
    | {
        "indexer_compress_ratio": 16,
        "indexer_budget": 16,
        "indexer_head_dim": 36,
        "hc_count": 5,
        "hc_lowrank": 7,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
        "ple_layer_ids": [2],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 8,
    },
    "qwen4_exp_text-pairs": _QWEN4
    | {
        "indexer_compress_ratio": 2,
        "indexer_budget": 6,
        "indexer_n_heads": 11,
        "ple_embed_dim": None,
        "output_gate_type": "silu",
        "num_key_value_heads": 8,
    },
    "olmo_hybrid": _DELTA,
    "olmo_hybrid-unrotated": _DELTA
    | {
        "linear_allow_neg_eigval": False,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1]},
    "bamba-one-group": _MAMBA_2
    | {
        "attn_layer_indices": [0],
        "mamba_n_groups": 1,
        "mamba_d_state": 20,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "time_step_limit": [0.3, 1.5],
    },
    "granitemoehybrid": _MAMBA_2
    | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
        "intermediate_size": 48,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "granitemoehybrid-dense": _MAMBA_2
    | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_groups": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "position_embedding_type": "rope",
    },
    "falcon_h1": _MAMBA_2
    | {
        "mamba_d_ssm": 128,
        "ssm_multipliers": [0.5, 0.8, 1.5, 0.7, 1.25],
        "ssm_in_multiplier": 1.5,
        "ssm_out_multiplier": 0.5,
        "attention_in_multiplier": 0.75,
        "attention_out_multiplier": 1.25,
        "key_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.6],
        "lm_head_multiplier": 0.4,
        "embedding_multiplier": 5.0,
    },
    "falcon_h1-norm": _MAMBA_2
    | {
        "mamba_d_ssm": 96,
        "mamba_d_head": 12,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 1,
        "projectors_bias": True,
    },
    "falcon_h1-norm-first": _MAMBA_2 | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "nemotron_h": _NEMOTRON
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    "nemotron_h-odd": _NEMOTRON
    | {
        "layers_block_type": ["mlp", "full_attention", "linear_attention", "mlp"],
        "n_groups": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 10,
        "mlp_bias": True,
    },
    "mamba": _MAMBA,
    "mamba-biased": _MAMBA | {"use_bias": True, "state_size": 10, "expand": 1, "conv_kernel": 3},
    "falcon_mamba": _MAMBA,
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 12,
        "chunk_size": 8,
        "num_hidden_layers": 2,
        "use_cache": False,
    },
    "jamba": _JAMBA,
    "jamba-dense": _JAMBA
    | {"num_experts": 1, "mamba_d_state": 7, "mamba_dt_rank": 3, "mamba_proj_bias": True},
    "kimi_linear": _KIMI,
    "kimi_linear-no-group": _KIMI
    | {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_head_dim": 20,
        "linear_num_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "bailing_hybrid": _KIMI,
    "bailing_hybrid-unbounded": _KIMI
    | {"kda_safe_gate": False, "head_dim": 20, "n_group": 1, "topk_group": 1},
    "minimax": _MINIMAX,
    "minimax-factors": _MINIMAX
    | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "full_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 0.7,
        "linear_attn_beta_factor": 1.25,
        "mlp_alpha_factor": 1.3,
        "mlp_beta_factor": 0.9,
        "num_attention_heads": 4,
        "head_dim": 24,
    },
    "nemotron_h-experts": _NEMOTRON
    | _NEMOTRON_EXPERTS
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "nemotron_h-latent-experts": _NEMOTRON
    | _NEMOTRON_EXPERTS
    | {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "moe_latent_size": 40,
        "n_group": 1,
        "topk_group": 1,
    },
    "recurrent_gemma": _RECURRENT_GEMMA,
    "recurrent_gemma-wide": _RECURRENT_GEMMA
    | {
        "lru_width": 96,
        "conv1d_width": 3,
        "num_key_value_heads": 4,
        "block_types": ["attention", "recurrent"],
    },
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v4-two-rates": _DEEPSEEK_V4
    | {
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "heavily_compressed_attention",
        ],
        "num_hidden_layers": 4,
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
        "head_dim": 20,
        "partial_rotary_factor": 0.4,
        "index_topk": 3,
        "hc_mult": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v4-no-window": _DEEPSEEK_V4
    | {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 5,
        "scoring_func": "sigmoid",
        "hc_mult": 1,
    },
    "deepseek_v4-long": _DEEPSEEK_V4
    | {
        "layer_types": ["heavily_compressed_attention"] * 2 + ["sliding_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "sliding_window": 3,
        "checkpoint": {"save_original_format": False},
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
    },
    "deepseek_v4-dense-choice": _DEEPSEEK_V4
    | {
        "layer_types": ["compressed_sparse_attention"] * 3,
        "mlp_layer_types": ["moe"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 64,
        "index_head_dim": 12,
        "head_dim": 36,
        "partial_rotary_factor": 2 / 9,
        "sliding_window": 5,
        "hc_sinkhorn_iters": 20,
    },
    "glm5_next_text": _GLM5_NEXT,
    "glm5_next_text-shared-choice": _GLM5_NEXT
    | {
        "layer_types": ["indexed_attention"] * 2 + ["linear_attention"] + ["indexed_attention"] * 2,
        "indexer_types": ["full", "shared", "shared", "full", "shared"],
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        "num_hidden_layers": 5,
        "index_kpool": 2,
        "index_topk": 6,
        "index_head_dim": 20,
        "hc_mult": 2,
        "n_shared_experts": 2,
    },
    "glm5_next_text-long-pools": _GLM5_NEXT
    | {
        "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
        "index_kpool": 8,
        "index_topk": 16,
        "kv_lora_rank": 36,
        "qk_nope_head_dim": 20,
        "v_head_dim": 12,
        "hc_mult": 1,
        "hc_sinkhorn_iters": 20,
        "linear_lower_bound": None,
    },
    "glm5_next_text-one-pool": _GLM5_NEXT
    | {
        "index_kpool": 16,
        "index_topk": 16,
        "index_head_dim": 48,
        "linear_num_heads": 4,
        "linear_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": True,
    },
    "glm5_next_text-dense-choice": _GLM5_NEXT
    | {
        "layer_types": ["indexed_attention"] * 3,
        "index_topk": 64,
        "index_kpool": 2,
        "hc_mult": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "checkpoint": {"save_original_format": False},
    },
    "zaya": _ZAYA,
    "zaya-one-kv-head": _ZAYA
    | {"num_key_value_heads": 1, "cca_time0": 3, "layer_types": ["hybrid"] * 3, "lm_head_bias": True},
    "zaya-four-kv-heads": _ZAYA
    | {
        "num_key_value_heads": 4,
        "head_dim": 20,
        "cca_time1": 3,
        "num_experts": 3,
        "tie_word_embeddings": False,
    },
    "zaya-by-channel": _ZAYA | {"cca_time1": 1, "router_hidden_size": 13, "num_experts": 8},
    "zaya-by-head": _ZAYA | {"cca_time0": 1, "num_key_value_heads": 8, "moe_intermediate_size": 35},
    "zamba": _ZAMBA,
    "zamba-four-heads": _ZAMBA
    | {
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
        "num_hidden_layers": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 7,
        "mamba_dt_rank": 3,
        "num_key_value_heads": 8,
        "intermediate_size": 100,
    },
    "zamba-one-head": _ZAMBA
    | {
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 1,
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "mamba_expand": 3,
    },
    "zamba-eight-heads": _ZAMBA
    | {
        "layers_block_type": ["hybrid", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 5,
        "mamba_expand": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "zamba-wide": _ZAMBA
    | {
        "n_mamba_heads": 2,
        "mamba_d_conv": 5,
        "mamba_d_state": 9,
        "hidden_size": 88,
        "num_attention_heads": 4,
        "attention_head_dim": 20,
        "num_key_value_heads": 2,
    },
    "zamba2": _ZAMBA_2,
    "zamba2-two-blocks": _ZAMBA_2
    | {
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 4,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": False,
        "num_key_value_heads": 8,
        "add_bias_linear": True,
        "mamba_ngroups": 2,
    },
}
