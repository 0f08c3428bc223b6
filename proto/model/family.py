"""Family: what the Hugging Face configuration of an architecture does not contain, or has under other names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .spec import ArchitectureTraits, Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(ArchitectureTraits):
    """Properties of an architecture that its configuration does not contain.

    Attributes:
        qkv_bias: the q, k and v projections have biases; None to read `qkv_bias_field`, and for the output
            `output_bias_field`.
        mlp_bias_field: field of the configuration that tells whether the feed-forward network has biases.
        eps_field: field of the configuration with the eps of norms.
        qk_norm_field: field of the configuration that tells whether there is a `qk_norm`; None if there always is.
        head_bias_field: field of the configuration that tells whether the head has a bias; None for `head_bias`.
        activation_field: field of the configuration with the activation.
        is_gemma: embeddings are multiplied by the square root of the hidden size, norm weights are stored minus 1,
            and ``query_pre_attn_scalar`` replaces head_dim in the attention scale.
        expert_fields: fields of the configuration with the number of experts and their intermediate size; None for
            dense architectures.
        experts_flag: field of the configuration that tells whether there are experts; None if there always are.
        top_k_field: field of the configuration with the number of experts per token.
        shared_count_field, shared_size_field: fields with the number of shared experts, of the size of the others, or
            with the size of one shared network.
        experts_normalized: the weights of a token's experts sum to 1; None to read ``norm_topk_prob``.
        routing: key of ROUTINGS.
        full_layers_unrotated: layers without a window have no positions, unless no layer has a window.
        is_latent: has multi-head latent attention.
        has_indexers: attends to the tokens that an indexer chooses.
        indexer_interleaved: as IndexerSpec.interleaved, unless the configuration has ``indexer_rope_interleave``.
        all_layers_windowed: ``sliding_window`` applies to every layer, regardless of ``layer_types``.
        adapt: returns a configuration with the field names that the other families have.

    The other fields have the meaning that DecoderSpec gives them.
    """

    qkv_bias: bool | None = None
    qkv_bias_field: str = "attention_bias"
    output_bias_field: str | None = "attention_bias"
    mlp_bias_field: str = "mlp_bias"
    eps_field: str = "rms_norm_eps"
    qk_norm: str | None = None
    qk_norm_field: str | None = None
    norms: Norms = field(default_factory=Norms)
    norm_offset: float = 0.0
    activation_field: str = "hidden_act"
    parallel_residual: bool = False
    full_layers_unrotated: bool = False
    is_gemma: bool = False
    expert_fields: tuple[str, str] | None = None
    experts_flag: str | None = None
    top_k_field: str = "num_experts_per_tok"
    shared_count_field: str = "n_shared_experts"
    shared_size_field: str | None = None
    experts_normalized: bool | None = None
    routing: str = "softmax"
    is_latent: bool = False
    has_indexers: bool = False
    indexer_interleaved: bool = False
    all_layers_windowed: bool = False
    adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    head_bias: bool = False
    head_bias_field: str | None = None


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
