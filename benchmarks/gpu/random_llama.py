"""A Llama of random weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.checkpoints import Shapes, write_checkpoint
from benchmarks.gpu.sizes import ModelShape


def write_llama(folder: Path, shape: ModelShape, dtype: str, device: str) -> int:
    """Write the model unless it is there; return the bytes of its weights."""
    return write_checkpoint(folder, llama_config(shape), _shapes(shape), dtype, device)


def llama_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **asdict(shape),
    }


def layer_projections(shape: ModelShape, attention_inputs: int) -> dict[str, tuple[int, int]]:
    """Return name |-> shape of the projections of one layer.

    Args:
        attention_inputs: numbers that attention reads per token.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    return {
        "self_attn.q_proj": (q, attention_inputs),
        "self_attn.k_proj": (kv, attention_inputs),
        "self_attn.v_proj": (kv, attention_inputs),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _shapes(shape: ModelShape) -> Shapes:
    """Yield name and shape of every tensor."""
    hidden = shape.hidden_size
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for name, size in layer_projections(shape, hidden).items():
            yield f"{layer}.{name}.weight", size
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)
