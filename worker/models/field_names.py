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


def llama4_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Llama 4, which names the size of its dense layers after that of its experts."""
    return hf | {
        "moe_intermediate_size": hf["intermediate_size"],
        "intermediate_size": hf["intermediate_size_mlp"],
        "no_rope_layers": hf["no_rope_layers"][: hf["num_hidden_layers"]],
    }
