"""Experts of an architecture, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .config_fields import required, uniform
from .family import Family
from .spec import Experts


def read_experts(model: ModelConfig, family: Family) -> Experts | None:
    """Return the model's experts, or None if it has none. Raises ConfigError if a setting is not supported."""
    if family.expert_fields is None or not is_mixture(model.hf, family):
        return None
    count_field, size_field = family.expert_fields
    # Newer configurations have num_local_experts, which transformers maps to the older name.
    count = model.hf.get(count_field) or required(model, "num_local_experts")
    top_k = uniform(model, family.top_k_field)
    if not 0 < top_k <= count:
        raise ConfigError(f"{model.name}: {family.top_k_field} is {top_k}, but it has {count} experts")
    if model.hf.get("clip_qkv") is not None:
        raise ConfigError(f"{model.name}: bounded queries, keys and values (clip_qkv) are not supported")
    normalized = family.experts_normalized
    size = required(model, size_field)
    experts = Experts(
        count,
        top_k,
        size,
        bool(model.hf.get("norm_topk_prob")) if normalized is None else normalized,
        shared_intermediate_size=size * (model.hf.get(family.shared_count_field) or 0)
        if family.shared_size_field is None
        else required(model, family.shared_size_field),
        shared_bias=bool(model.hf.get(family.mlp_bias_field)),
    )
    experts = ROUTINGS[family.routing](experts, model.hf)
    _check_groups(model, experts)
    return experts


def is_mixture(hf: dict[str, Any], family: Family) -> bool:
    """Return whether some layers have experts."""
    has_flag = family.experts_flag is None or bool(hf.get(family.experts_flag))
    return family.expert_fields is not None and has_flag


def has_experts(hf: dict[str, Any], index: int) -> bool:
    """Return whether a layer of a mixture has experts."""
    if (listed := hf.get("moe_layers")) is not None:
        return index in listed
    if (kinds := hf.get("mlp_layer_types")) is not None:
        return list(kinds[index : index + 1]) == ["sparse"]
    first = hf.get("first_k_dense_replace") or hf.get("moe_layer_start_index") or 0
    last = hf.get("moe_layer_end_index", -1)
    if index < first or 0 <= last < index:
        return False
    step = hf.get("decoder_sparse_step") or hf.get("moe_layer_interval") or 1
    return index not in (hf.get("mlp_only_layers") or []) and (index + 1) % step == 0


def _check_groups(model: ModelConfig, experts: Experts) -> None:
    """Raise ConfigError unless each token finds its experts within its groups."""
    num_groups, num_top, count = experts.num_groups, experts.num_top_groups, experts.count
    if not 0 < num_top <= num_groups or count % num_groups:
        raise ConfigError(
            f"{model.name}: {count} experts cannot be chosen from {num_top} of {num_groups} equal groups"
        )
    if experts.top_k > count // num_groups * num_top:
        raise ConfigError(
            f"{model.name}: num_experts_per_tok is {experts.top_k}, but {num_top} groups have "
            f"{count // num_groups * num_top} experts"
        )


def _group_limited_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of DeepSeek-V2: the best experts of the groups with the best experts."""
    experts = replace(experts, scale=float(hf.get("routed_scaling_factor") or 1.0))
    if hf.get("topk_method") != "group_limited_greedy":
        return experts
    return replace(experts, num_groups=hf["n_group"], num_top_groups=hf["topk_group"])


def _corrected_sigmoid_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of DeepSeek-V3: sigmoid scores, a bias that balances the load, and groups by their two best experts."""
    return replace(
        experts,
        score="sigmoid",
        num_groups=hf.get("n_group") or 1,
        num_top_groups=hf.get("topk_group") or 1,
        group_score="top2",
        correction_bias=True,
        scale=float(hf.get("routed_scaling_factor") or 1.0),
    )


def _gpt_oss_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of gpt-oss: biases everywhere, and a clamped activation."""
    clamp = float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])
    return replace(experts, score="softmax_of_chosen", router_bias=True, interleaved=True, clamp=clamp)


def _llama4_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of Llama 4: the sigmoids of the chosen logits multiply the inputs of experts."""
    return replace(experts, score="sigmoid_of_chosen", scaled_inputs=True, transposed=True)


def _sparsemixer_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of Phi-MoE: the two best experts, each with a softmax of its own."""
    if experts.top_k != 2:
        raise ConfigError(f"num_experts_per_tok is {experts.top_k}, must be 2 with the routing of Phi-MoE")
    return replace(experts, score="sparsemixer", jitter=float(hf.get("router_jitter_noise", 0.01)))


# Family.routing |-> function that adds the settings of a configuration.
ROUTINGS: dict[str, Callable[[Experts, dict[str, Any]], Experts]] = {
    "softmax": lambda experts, hf: experts,
    "group_limited": _group_limited_routing,
    "corrected_sigmoid": _corrected_sigmoid_routing,
    "gpt_oss": _gpt_oss_routing,
    "llama4": _llama4_routing,
    "sparsemixer": _sparsemixer_routing,
    "corrected_softmax": lambda experts, hf: replace(experts, correction_bias=True),
    "beside_dense": lambda experts, hf: replace(experts, beside_dense=True),
    "gated_sharing": lambda experts, hf: replace(experts, shared_gate=True),
}
