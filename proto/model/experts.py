"""Experts: a mixture of experts, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .config_fields import required, uniform


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts that replaces a feed-forward network (Shazeer et al., 2017; Jiang et al., 2024).

    Attributes:
        count: number of experts.
        top_k: experts per token (top k of the router).
        intermediate_size: of one expert.
        normalized: scale the weights of a token's experts to sum to 1.
        score: function of the router's logits: ``softmax`` over all experts, ``softmax_of_top_k`` or
            ``sigmoid_of_top_k`` over the best ones, ``sigmoid`` or ``sqrt_softplus`` of each, or ``sparsemixer`` (see
            `jitter`).
        router_bias: the router's linear layer has a bias.
        num_groups, num_top_groups: a token's experts are selected from its best `num_top_groups` of `num_groups`
            groups of equal size (group-limited routing; DeepSeek-AI, *DeepSeek-V2*, 2024).
        group_score: score of a group: that of its best expert, ``max``, or the sum of its best two, ``top2``.
        logits_scale: multiplies the router's logits.
        correction_bias: a stored bias per expert is added to the scores that experts are selected by, but not to
            their weights (DeepSeek-AI, *DeepSeek-V3*, 2024).
        may_lack_correction: checkpoints without that bias are read, too.
        scale: multiplies the weights of a token's experts.
        num_zero: further experts that the router scores, whose result is their input (*LongCat-Flash*, 2025).
        shared_intermediate_size: of a feed-forward network that every token passes besides its experts; 0 for none.
        shared_bias: the projections of that network have biases.
        shared_gate: each token's result of that network is multiplied by the sigmoid of a linear layer.
        interleaved: the experts are stored as in gpt-oss: rows of gate and up alternate, and all layers have biases.
        transposed: stacks of all experts store each matrix as [inputs, outputs].
        scaled_inputs: a token's weights multiply the inputs of its experts instead of their results.
        clamp: `alpha`, `limit` and `offset` of kernels.activation.clamped_silu_and_mul; None for the model's own
            activation.
        clamps_shared: the network that every token passes has this activation too.
        exact_router: the router computes in float32, whatever its scores are.
        limits: of the activated gates and the other halves of the experts, and of the network that every token
            passes; 0 for none.
        gated: each expert has a gate and an up projection; otherwise an up projection alone.
        latent_size: of what the experts read and write, which is projected from and to the hidden size; 0 for that.
        result_eps: of the norm of each expert's result, after stored factors of its numbers; 0 for no norm. A rank
            then holds whole experts.
        jitter: of sparsemixer: experts whose logits are within twice this part of the best one's share its softmax.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalized: bool
    score: str = "softmax"
    router_bias: bool = False
    num_groups: int = 1
    num_top_groups: int = 1
    group_score: str = "max"
    logits_scale: float = 1.0
    correction_bias: bool = False
    may_lack_correction: bool = False
    scale: float = 1.0
    num_zero: int = 0
    shared_intermediate_size: int = 0
    shared_bias: bool = False
    shared_gate: bool = False
    interleaved: bool = False
    transposed: bool = False
    scaled_inputs: bool = False
    clamp: tuple[float, float, float] | None = None
    clamps_shared: bool = False
    exact_router: bool = False
    limits: tuple[float, float] = (0.0, 0.0)
    jitter: float = 0.0
    gated: bool = True
    latent_size: int = 0
    result_eps: float = 0.0

    @property
    def are_whole(self) -> bool:
        """True if the ranks cannot share an expert: a norm reads the whole of its result."""
        return self.result_eps > 0

    @property
    def num_scored(self) -> int:
        """Number of experts that the router scores."""
        return self.count + self.num_zero


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """Fields of an architecture's configuration that describe its experts, and what no field tells.

    Attributes:
        count, size, top_k: number of experts, their intermediate size, and experts per token.
        flag: tells whether there are experts; None if there always are.
        shared_count, shared_size: number of shared experts, of the size of the others, or size of one shared network.
        normalized: the weights of a token's experts sum to 1; None to read ``norm_topk_prob``.
        routing: key of ROUTINGS.
    """

    count: str
    size: str
    top_k: str = "num_experts_per_tok"
    flag: str | None = None
    shared_count: str = "n_shared_experts"
    shared_size: str | None = None
    normalized: bool | None = None
    routing: str = "softmax"

    def is_mixture(self, hf: dict[str, Any]) -> bool:
        """Return whether a model has experts."""
        return self.flag is None or bool(hf.get(self.flag))


def read_experts(model: ModelConfig, fields: ExpertFields, *, has_bias: bool) -> Experts | None:
    """Return the model's experts, or None if it has none. Raises ConfigError if a setting is not supported.

    Args:
        has_bias: the feed-forward networks have biases.
    """
    if not fields.is_mixture(model.hf):
        return None
    # Newer configurations have num_local_experts, which transformers maps to the older name.
    count = model.hf.get(fields.count) or required(model, "num_local_experts")
    top_k = uniform(model, fields.top_k)
    if not 0 < top_k <= count:
        raise ConfigError(f"{model.name}: {fields.top_k} is {top_k}, but it has {count} experts")
    if model.hf.get("clip_qkv") is not None:
        raise ConfigError(f"{model.name}: bounded queries, keys and values (clip_qkv) are not supported")
    normalized, size = fields.normalized, required(model, fields.size)
    experts = Experts(
        count,
        top_k,
        size,
        bool(model.hf.get("norm_topk_prob")) if normalized is None else normalized,
        shared_intermediate_size=size * (model.hf.get(fields.shared_count) or 0)
        if fields.shared_size is None
        else required(model, fields.shared_size),
        shared_bias=has_bias,
    )
    experts = ROUTINGS[fields.routing](experts, model.hf)
    _check_groups(model, experts)
    return experts


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


def _grouped_softmax_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of Mistral 4: softmax scores, and groups by their two best experts."""
    return replace(_corrected_sigmoid_routing(experts, hf), score="softmax", correction_bias=False)


def _exact_softmax_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of Mistral Large 4: that of Mistral 4 in float32."""
    return replace(_grouped_softmax_routing(experts, hf), exact_router=True)


def _gpt_oss_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of gpt-oss: biases everywhere, and a clamped activation."""
    clamp = float(hf["swiglu_alpha"]), float(hf["swiglu_limit"]), 1.0
    return replace(experts, score="softmax_of_top_k", router_bias=True, interleaved=True, clamp=clamp)


def _hashed_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of DeepSeek-V4; in some layers a stored table has the experts of each token id."""
    scores = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
    if hf["scoring_func"] not in scores:
        raise ConfigError(
            f"scoring_func {hf['scoring_func']!r:.100} is not supported, only {', '.join(scores)}"
        )
    return replace(
        experts,
        score=scores[hf["scoring_func"]],
        correction_bias=True,
        scale=float(hf["routed_scaling_factor"]),
        clamp=(1.0, float(hf["swiglu_limit"]), 0.0),
        clamps_shared=True,
    )


def _clamped_sigmoid_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of HY V4: as DeepSeek-V3's, with a clamped activation."""
    limit = float(hf.get("swiglu_limit") or 0.0)
    return replace(_corrected_sigmoid_routing(experts, hf), clamp=(1.0, limit, 0.0) if limit > 0 else None)


def _all_clamped_sigmoid_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of GLM-5 Next: as HY V4's, and the network that every token passes is clamped, too."""
    return replace(_clamped_sigmoid_routing(experts, hf), clamps_shared=True)


def _offset_sigmoid_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of MiniMax-M3: as DeepSeek-V3's, all with the activation of gpt-oss."""
    clamp = float(hf["swiglu_alpha"]), float(hf["swiglu_limit"]), 1.0
    return replace(_corrected_sigmoid_routing(experts, hf), clamp=clamp, clamps_shared=True)


def _llama4_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of Llama 4: the sigmoids of the top-k logits multiply the inputs of experts."""
    return replace(experts, score="sigmoid_of_top_k", scaled_inputs=True, transposed=True)


def _sparsemixer_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing of Phi-MoE: the two best experts, each with a softmax of its own."""
    if experts.top_k != 2:
        raise ConfigError(f"num_experts_per_tok is {experts.top_k}, must be 2 with the routing of Phi-MoE")
    return replace(experts, score="sparsemixer", jitter=float(hf.get("router_jitter_noise", 0.01)))


def _ungated_sigmoid_routing(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of Nemotron 3, which have no gates and may have a smaller width of their own."""
    latent_size = hf.get("moe_latent_size") or 0
    if latent_size and experts.shared_bias:
        raise ConfigError("biases of feed-forward networks (mlp_bias) with moe_latent_size are not supported")
    return replace(_corrected_sigmoid_routing(experts, hf), gated=False, latent_size=latent_size)


def _normalized_results(experts: Experts, hf: dict[str, Any]) -> Experts:
    """Routing and experts of Muse Spark: as DeepSeek-V3's, with a width of their own and a norm of their results."""
    return replace(
        _corrected_sigmoid_routing(experts, hf),
        logits_scale=float(hf["output_multiplier"]),
        latent_size=int(hf["moe_hidden_size"]),
        result_eps=float(hf["post_norm_eps"]),
    )


# ExpertFields.routing |-> function that adds the settings of a configuration.
ROUTINGS: dict[str, Callable[[Experts, dict[str, Any]], Experts]] = {
    "softmax": lambda experts, hf: experts,
    "group_limited": _group_limited_routing,
    "corrected_sigmoid": _corrected_sigmoid_routing,
    "grouped_softmax": _grouped_softmax_routing,
    "exact_softmax": _exact_softmax_routing,
    "optionally_corrected_sigmoid": lambda experts, hf: replace(
        _corrected_sigmoid_routing(experts, hf), may_lack_correction=True
    ),
    "biased_sigmoid": lambda experts, hf: replace(
        _corrected_sigmoid_routing(experts, hf), correction_bias=bool(hf.get("use_expert_bias"))
    ),
    "ungated_sigmoid": _ungated_sigmoid_routing,
    "normalized_results": _normalized_results,
    "gpt_oss": _gpt_oss_routing,
    "hashed": _hashed_routing,
    "clamped_sigmoid": _clamped_sigmoid_routing,
    "all_clamped_sigmoid": _all_clamped_sigmoid_routing,
    "offset_sigmoid": _offset_sigmoid_routing,
    "zero_experts": lambda experts, hf: replace(
        experts,
        correction_bias=True,
        scale=float(hf.get("routed_scaling_factor") or 1.0),
        num_zero=hf.get("zero_expert_num") or 0,
    ),
    "top_k_softmax": lambda experts, hf: replace(experts, score="softmax_of_top_k"),
    "llama4": _llama4_routing,
    "sparsemixer": _sparsemixer_routing,
    "corrected_softmax": lambda experts, hf: replace(experts, correction_bias=True),
    "gated_sharing": lambda experts, hf: replace(experts, shared_gate=True),
}
