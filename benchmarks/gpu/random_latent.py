"""A DeepSeek of random weights, with multi-head latent attention and without experts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.checkpoints import Shapes, write_checkpoint
from benchmarks.gpu.sizes import LatentShape


def write_latent_model(folder: Path, shape: LatentShape, dtype: str, device: str) -> int:
    """Write the model unless it is there; return the bytes of its weights."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "num_key_value_heads": shape.num_attention_heads,
        "q_lora_rank": None,
        # The configuration has experts, but no layer has.
        "first_k_dense_replace": shape.num_hidden_layers,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        **asdict(shape),
    }
    return write_checkpoint(folder, config, _shapes(shape), dtype, device)


def _shapes(shape: LatentShape) -> Shapes:
    """Yield name and shape of every tensor."""
    hidden, inner, heads, rank = (
        shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.kv_lora_rank,
    )  # fmt: skip
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{attention}.q_proj.weight", (heads * shape.qk_dim, hidden)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (shape.cached_dim, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (rank,)
        yield f"{attention}.kv_b_proj.weight", (heads * (shape.qk_nope_head_dim + shape.v_head_dim), rank)
        yield f"{attention}.o_proj.weight", (hidden, heads * shape.v_head_dim)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for own, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{layer}.mlp.{own}_proj.weight", (rows, columns)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)
