"""GPT-J: other names for everything, biases of head and feed-forward network, one norm per layer."""

from __future__ import annotations

from typing import Any

from ..family import Family, FieldNames
from ..spec import Names, Norms


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of GPT-J with the fields of Llama."""
    rotary_dim, head_dim = hf["rotary_dim"], hf["n_embd"] // hf["n_head"]
    return hf | {
        "hidden_size": hf["n_embd"],
        "intermediate_size": hf.get("n_inner") or 4 * hf["n_embd"],
        "mlp_bias": True,
        "lm_head_bias": True,
        "max_position_embeddings": hf["n_positions"],
        "partial_rotary_factor": None if rotary_dim is None else rotary_dim / head_dim,
    }


FAMILY = Family(
    fields=FieldNames("layer_norm_epsilon", "activation_function", head_bias="lm_head_bias"),
    qkv_bias=False,
    norms=Norms("ln_1", before_mlp=None, kind="layer"),
    mlp_names=("fc_in", "fc_out"),
    interleaved_rope=True,
    parallel_residual=True,
    names=Names("transformer.wte", "transformer.h", "attn", "out_proj", last_norm="transformer.ln_f"),
    adapt=_adapt,
)
