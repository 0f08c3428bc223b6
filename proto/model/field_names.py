"""Configurations of some families, with the field names that most families have."""

from __future__ import annotations

from typing import Any


def gptj_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of GPT-J with the fields of Llama."""
    rotary_dim, head_dim = hf["rotary_dim"], hf["n_embd"] // hf["n_head"]
    return hf | {
        "hidden_size": hf["n_embd"],
        "intermediate_size": hf.get("n_inner") or 4 * hf["n_embd"],
        "mlp_bias": True,
        "max_position_embeddings": hf["n_positions"],
        "partial_rotary_factor": None if rotary_dim is None else rotary_dim / head_dim,
    }


def gemma4_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Gemma 4, whose layers that share keys and values may be twice as wide."""
    num_layers, width = hf["num_hidden_layers"], hf["intermediate_size"]
    num_own = num_layers - (hf.get("num_kv_shared_layers") or 0)
    wide = 2 * width if hf.get("use_double_wide_mlp") else width
    # "vision" concerns the tokens of images only.
    attention = hf.get("use_bidirectional_attention")
    return hf | {
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
        "attention_multiplier": 1.0,
        "layer_intermediate_sizes": [width if index < num_own else wide for index in range(num_layers)],
        "use_bidirectional_attention": None if attention == "vision" else attention,
    }


def gemma3n_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Gemma 3n, which lists the sizes of all feed-forward networks."""
    return hf | {
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
        "attention_multiplier": 1.0,
        "intermediate_size": max(hf["intermediate_size"]),
        "layer_intermediate_sizes": hf["intermediate_size"],
    }


def llama4_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Llama 4, which names the size of its dense layers after that of its experts."""
    return hf | {
        "moe_intermediate_size": hf["intermediate_size"],
        "intermediate_size": hf["intermediate_size_mlp"],
        "no_rope_layers": hf["no_rope_layers"][: hf["num_hidden_layers"]],
    }
