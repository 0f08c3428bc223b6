"""DecoderSpec: the differences between decoder architectures, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from .mtp_layouts import mtp_prefixes
from .rope import DEFAULT_THETA, Rope, RopeContext, make_rope, yarn_scale

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Activation in a Hugging Face configuration |-> name in DecoderSpec.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Further ones of feed-forward networks that are not gated.
UNGATED_ACTIVATIONS = {"relu2": "relu_squared"}


@dataclass(frozen=True, slots=True)
class Norms:
    """Checkpoint names of a layer's norms; None if the layer has no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names of a decoder's parts; those of attention and feed-forward network are within a layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention: str = "self_attn"
    attention_output: str = "o_proj"
    mlp: str = "mlp"
    last_norm: str = "model.norm"


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts that replaces a feed-forward network (Shazeer et al., 2017; Jiang et al., 2024).

    Attributes:
        count: number of experts.
        per_token: experts per token (top k of the router).
        intermediate_size: of one expert.
        normalized: scale the weights of a token's experts to sum to 1.
        score: function of the router's logits: ``softmax`` over all experts, ``softmax_of_chosen`` or
            ``sigmoid_of_chosen`` over the chosen ones, or ``sigmoid`` of each.
        router_bias: the router's linear layer has a bias.
        num_groups, num_top_groups: a token's experts are chosen from its best `num_top_groups` of `num_groups` groups
            of equal size (group-limited routing; DeepSeek-AI, *DeepSeek-V2*, 2024).
        group_score: score of a group: that of its best expert, ``max``, or the sum of its best two, ``top2``.
        correction_bias: a stored bias per expert is added to the scores that experts are chosen by, but not to their
            weights (DeepSeek-AI, *DeepSeek-V3*, 2024).
        scale: multiplies the weights of a token's experts.
        shared_intermediate_size: of a feed-forward network that every token passes besides its experts; 0 for none.
        shared_gate: each token's result of that network is multiplied by the sigmoid of a linear layer.
        interleaved: the experts are stored as in gpt-oss: rows of gate and up alternate, and all layers have biases.
        transposed: stacks of all experts store each matrix as [inputs, outputs].
        scaled_inputs: a token's weights multiply the inputs of its experts instead of their results.
        beside_dense: the result is added to that of the layer's dense network, each with norms of its own.
        clamp: `alpha` and `limit` of kernels.activation.clamped_silu_and_mul; None for the model's own activation.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    score: str = "softmax"
    router_bias: bool = False
    num_groups: int = 1
    num_top_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    scale: float = 1.0
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    interleaved: bool = False
    transposed: bool = False
    scaled_inputs: bool = False
    beside_dense: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention (DeepSeek-AI, *DeepSeek-V2*, 2024).

    Attributes:
        rank: C, numbers of the latent that a token's keys and values are computed from.
        query_rank: numbers of the latent that its queries are computed from; None if they have none.
        key_dim, shared_dim, value_dim: N, R and V, numbers of a head's own part of a key, of the rotated part that
            all heads share, and of a value.
        interleaved: numbers 2 i and 2 i + 1 of the rotated part are a pair.
    """

    rank: int
    query_rank: int | None
    key_dim: int
    shared_dim: int
    value_dim: int
    interleaved: bool

    @property
    def qk_dim(self) -> int:
        return self.key_dim + self.shared_dim

    @property
    def cached_dim(self) -> int:
        return self.rank + self.shared_dim

    def expansion_is_cheaper(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
        """Return whether chunks take fewer products with keys and values than with latents.

        With 512 + 64 numbers per latent and 128 + 64 + 128 of a head: from 171 queries per sequence on.
        """
        num_pairs = sum(queries * keys for queries, keys in zip(query_lens, seq_lens, strict=True))
        expanding = sum(seq_lens) * self.rank * (self.key_dim + self.value_dim)
        expanded = expanding + num_pairs * (self.qk_dim + self.value_dim)
        return expanded < num_pairs * (self.cached_dim + self.rank)


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Factors of the queries of layers without positions, which grow with the position (Nakanishi, 2025).

    The factor of position p is ``1 + scale * log(1 + floor((p + 1) / interval))``.
    """

    scale: float
    interval: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The differences between layers of one model.

    Attributes:
        window: tokens that a token attends to, itself included; 0 for all.
        chunk: a token attends to those from the last multiple of `chunk` on, itself included; 0 for all.
        rope: key of the layer's rotary embedding in DecoderSpec.ropes; None for layers without positions.
        has_experts: its feed-forward network is a mixture of experts.
        num_kv_heads, head_dim, intermediate_size: of the layer; None for those of DecoderSpec.
        kv_source: index of the layer whose keys and values it attends to; None if it has its own.
        values_are_keys: the projected keys are its values too, before norm and rotation.
    """

    window: int = 0
    chunk: int = 0
    rope: str | None = FULL
    has_experts: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    kv_source: int | None = None
    values_are_keys: bool = False


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Embeddings of their own that each layer adds its part of, per token (Gemma 3n, 2025).

    Attributes:
        size: P, numbers per layer.
        vocab_size: of these embeddings; other tokens have those of token 0.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several streams of the residual, of which a layer computes one (Baykal et al., 2023).

    Attributes:
        num_streams: N.
        active: index of the stream that layers compute.
        scales_output: the computed stream is scaled by stored numbers before the layer's inputs are gated by it.
        laurel_rank: numbers of the low-rank addend of attention.
        sparsities: of the feed-forward network of each layer; 0 for a dense one.
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
    sparsities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and options of a decoder; sizes are those of the whole model, not of a rank's shard.

    Attributes:
        ropes: key |-> rotary embedding.
        attention_scale: multiplies the products of queries and keys.
        attention_soft_cap, logits_soft_cap: ``cap * tanh(x / cap)`` bounds scores and logits; 0 for unbounded.
        attention_sinks: each head has one more key, whose value is 0 (kernels.attention_variant).
        qk_norm: norm of queries and keys: RMSNorm before the rotation over each ``head`` or the whole ``projection``,
            or after it over each ``rotated_head``, or ``rotated_unweighted`` in layers with positions only;
            LayerNorm with weights per head, ``layer_norm``; None for no norm.
        qk_norm_names: of the norms of queries and keys in the checkpoint; with a ``{}``, each head has its own.
        fused_qkv, fused_gate_up: checkpoints store q, k and v as one ``qkv_proj``, gate and up as one
            ``gate_up_proj``.
        mlp_names: of an ungated feed-forward network's layers, up and down; None for a gated one.
        interleaved_rope: the numbers 2 i and 2 i + 1 of a head are a pair; their rows are reordered as they are read.
        norm_kind: of the other norms, ``rms``, or ``layer`` with a bias, or ``layer_without_bias``.
        norm_offset: added to the weights of all norms.
        parallel_residual: attention and feed-forward network have the same input.
        embedding_scale, residual_scale, logits_scale: multiply the embeddings, what a layer adds to the residual,
            and the logits.
        draft_prefixes: names of tensors of the checkpoint that only draft heads use begin with one of these.
        latent: multi-head latent attention; None for attention to keys and values of heads.
        names: of the parts in the checkpoint.
        head_bias: the head has a bias.
        query_temperature: of layers without positions; None for none.
        value_norm: values are normalized per head, by an RMSNorm without weights.
        per_layer_inputs: None for none.
        layer_scalars: the residual is multiplied by a stored number after each layer.
        altup: None for a residual of one stream.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: dict[str, Rope]
    attention_scale: float
    activation: str = "silu"
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    qk_norm: str | None = None
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    fused_qkv: bool = False
    fused_gate_up: bool = False
    mlp_names: tuple[str, str] | None = None
    interleaved_rope: bool = False
    norms: Norms = field(default_factory=Norms)
    norm_kind: str = "rms"
    norm_offset: float = 0.0
    parallel_residual: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    experts: Experts | None = None
    tied_embeddings: bool = False
    draft_prefixes: tuple[str, ...] = ()
    latent: LatentSpec | None = None
    names: Names = field(default_factory=Names)
    head_bias: bool = False
    query_temperature: QueryTemperature | None = None
    value_norm: bool = False
    per_layer_inputs: PerLayerInputs | None = None
    layer_scalars: bool = False
    altup: AltUp | None = None

    def of_layer(self, layer: LayerSpec) -> DecoderSpec:
        """Return the spec with the sizes of a layer."""
        return replace(
            self,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            head_dim=layer.head_dim or self.head_dim,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture that its configuration does not contain.

    Attributes:
        qkv_bias: the q, k and v projections have biases; None to read `qkv_bias_field`, and for the output
            `output_bias_field`.
        mlp_bias_field: field of the configuration that tells whether the feed-forward network has biases.
        eps_field: field of the configuration with the eps of norms.
        qk_norm_field: field of the configuration that tells whether there is a `qk_norm`; None if there always is.
        activation_field: field of the configuration with the activation.
        is_gemma: embeddings are multiplied by the square root of the hidden size, norm weights are stored minus 1,
            and ``query_pre_attn_scalar`` replaces head_dim in the attention scale.
        expert_fields: fields of the configuration with the number of experts and their intermediate size; None for
            dense architectures.
        experts_flag: field of the configuration that tells whether there are experts; None if there always are.
        per_token_field: field of the configuration with the number of experts per token.
        shared_count_field, shared_size_field: fields with the number of shared experts, of the size of the others, or
            with the size of one shared network.
        experts_normalized: the weights of a token's experts sum to 1; None to read ``norm_topk_prob``.
        routing: key of ROUTINGS.
        full_layers_unrotated: layers without a window have no positions, unless no layer has a window.
        is_latent: has multi-head latent attention.
        all_layers_windowed: ``sliding_window`` applies to every layer, regardless of ``layer_types``.
        adapt: returns a configuration with the field names that the other families have.

    The other fields are those of DecoderSpec.
    """

    qkv_bias: bool | None = None
    qkv_bias_field: str = "attention_bias"
    output_bias_field: str | None = "attention_bias"
    mlp_bias_field: str = "mlp_bias"
    eps_field: str = "rms_norm_eps"
    qk_norm: str | None = None
    qk_norm_field: str | None = None
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norms: Norms = field(default_factory=Norms)
    norm_kind: str = "rms"
    norm_offset: float = 0.0
    activation_field: str = "hidden_act"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    mlp_names: tuple[str, str] | None = None
    interleaved_rope: bool = False
    parallel_residual: bool = False
    full_layers_unrotated: bool = False
    is_gemma: bool = False
    expert_fields: tuple[str, str] | None = None
    experts_flag: str | None = None
    per_token_field: str = "num_experts_per_tok"
    shared_count_field: str = "n_shared_experts"
    shared_size_field: str | None = None
    experts_normalized: bool | None = None
    routing: str = "softmax"
    is_latent: bool = False
    all_layers_windowed: bool = False
    attention_sinks: bool = False
    adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    names: Names = field(default_factory=Names)
    head_bias: bool = False
    value_norm: bool = False
    layer_scalars: bool = False


def read_spec(model: ModelConfig, family: Family) -> DecoderSpec:
    """Return the model's DecoderSpec.

    Raises:
        ConfigError: the configuration has an option that Decoder does not support; names it.
    """
    model = _adapted(model, family)
    hf = model.hf
    qkv_bias, output_bias = bool(family.qkv_bias), False
    if family.qkv_bias is None:
        qkv_bias = bool(hf.get(family.qkv_bias_field))
        output_bias = family.output_bias_field is not None and bool(hf.get(family.output_bias_field))
    is_parallel = family.parallel_residual or bool(hf.get("use_parallel_residual"))
    has_qk_norm = family.qk_norm_field is None or bool(hf.get(family.qk_norm_field))
    activation = hf.get(family.activation_field) or "silu"
    activations = ACTIVATIONS | (UNGATED_ACTIVATIONS if family.mlp_names is not None else {})
    if activation not in activations:
        known = ", ".join(repr(name) for name in activations)
        raise ConfigError(
            f"{model.name}: {family.activation_field} {activation!r} is not supported, only {known}"
        )
    latent = _read_latent(model) if family.is_latent else None
    layers = _read_layers(model, family)
    shared_dim = None if latent is None else latent.shared_dim
    ropes = _read_ropes(
        model,
        {
            layer.rope: shared_dim or layer.head_dim or model.head_dim
            for layer in layers
            if layer.rope is not None
        },
    )
    return DecoderSpec(
        vocab_size=model.vocab_size,
        hidden_size=_required(model, "hidden_size"),
        intermediate_size=_required(model, "intermediate_size"),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_eps=_required(model, family.eps_field),
        layers=layers,
        ropes=ropes,
        attention_scale=_attention_scale(model) if latent is None else _latent_scale(model, latent),
        activation=activations[activation],
        attention_soft_cap=hf.get("attn_logit_softcapping") or 0.0,
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=bool(hf.get(family.mlp_bias_field)),
        attention_sinks=family.attention_sinks,
        qk_norm=family.qk_norm if has_qk_norm else None,
        qk_norm_names=family.qk_norm_names,
        fused_qkv=family.fused_qkv,
        fused_gate_up=family.fused_gate_up,
        mlp_names=family.mlp_names,
        interleaved_rope=family.interleaved_rope,
        norms=replace(family.norms, before_mlp=None) if is_parallel else family.norms,
        norm_kind=family.norm_kind,
        norm_offset=1.0 if family.is_gemma else family.norm_offset,
        parallel_residual=is_parallel,
        embedding_scale=model.hf["hidden_size"] ** 0.5
        if family.is_gemma
        else hf.get("embedding_multiplier", 1.0),
        residual_scale=hf.get("residual_multiplier", 1.0),
        logits_scale=hf.get("logit_scale") or 1.0 / hf.get("logits_scaling", 1.0),
        experts=_read_experts(model, family),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        draft_prefixes=mtp_prefixes(model),
        latent=latent,
        names=family.names,
        head_bias=family.head_bias,
        query_temperature=_read_temperature(hf),
        value_norm=family.value_norm,
        per_layer_inputs=_read_per_layer_inputs(hf),
        layer_scalars=family.layer_scalars,
        altup=_read_altup(hf),
    )


def read_layers(model: ModelConfig, family: Family) -> tuple[LayerSpec, ...]:
    """Return each layer's window, positions and experts. Raises ConfigError if an option is not supported."""
    return _read_layers(_adapted(model, family), family)


def _adapted(model: ModelConfig, family: Family) -> ModelConfig:
    return model if family.adapt is None else replace(model, hf=family.adapt(model.hf))


def _read_temperature(hf: dict[str, Any]) -> QueryTemperature | None:
    if not hf.get("attn_temperature_tuning"):
        return None
    return QueryTemperature(float(hf["attn_scale"]), float(hf["floor_scale"]))


def _read_per_layer_inputs(hf: dict[str, Any]) -> PerLayerInputs | None:
    size = hf.get("hidden_size_per_layer_input")
    return PerLayerInputs(size, hf["vocab_size_per_layer_input"]) if size else None


def _read_altup(hf: dict[str, Any]) -> AltUp | None:
    if not hf.get("altup_num_inputs"):
        return None
    return AltUp(
        hf["altup_num_inputs"],
        hf["altup_active_idx"],
        bool(hf["altup_correct_scale"]),
        hf["laurel_rank"],
        tuple(hf["activation_sparsity_pattern"]),
    )


def _required(model: ModelConfig, field: str) -> Any:
    if model.hf.get(field) is None:
        raise ConfigError(f"{model.name}: its config.json lacks {field!r}")
    return model.hf[field]


def _attention_scale(model: ModelConfig) -> float:
    if (scale := model.hf.get("attention_multiplier")) is not None:
        return float(scale)
    return float((model.hf.get("query_pre_attn_scalar") or model.head_dim) ** -0.5)


def _read_latent(model: ModelConfig) -> LatentSpec:
    hf = model.hf
    if hf.get("attention_bias"):
        raise ConfigError(f"{model.name}: biases of latent attention (attention_bias) are not supported")
    latent = LatentSpec(
        rank=_required(model, "kv_lora_rank"),
        query_rank=hf.get("q_lora_rank"),
        key_dim=_required(model, "qk_nope_head_dim"),
        shared_dim=_required(model, "qk_rope_head_dim"),
        value_dim=_required(model, "v_head_dim"),
        interleaved=bool(hf.get("rope_interleave", True)),
    )
    if latent.value_dim > latent.qk_dim:
        raise ConfigError(
            f"{model.name}: v_head_dim is {latent.value_dim}, must be at most qk_nope_head_dim + qk_rope_head_dim, "
            f"{latent.qk_dim}"
        )
    return latent


def _latent_scale(model: ModelConfig, latent: LatentSpec) -> float:
    """Return the scale of scores, which YaRN raises for all dimensions by the square of its own."""
    settings: dict[str, Any] = model.hf.get("rope_parameters") or model.hf.get("rope_scaling") or {}
    weight = settings.get("mscale_all_dim")
    scale: float = latent.qk_dim**-0.5
    if settings.get("rope_type", settings.get("type", "default")) == "default" or not weight:
        return scale
    return scale * yarn_scale(float(settings["factor"]), float(weight)) ** 2


def _read_layers(model: ModelConfig, family: Family) -> tuple[LayerSpec, ...]:
    """Read the fields of all families."""
    hf = model.hf
    window = (hf.get("sliding_window") or 0) if hf.get("use_sliding_window", True) else 0
    layer_types = _read_layer_types(model, family, window)
    if hf.get("use_bidirectional_attention"):
        raise ConfigError(
            f"{model.name}: bidirectional attention (use_bidirectional_attention) is not supported"
        )
    has_positions = hf.get("no_rope_layers") or [True] * model.num_layers
    if family.full_layers_unrotated and window:
        has_positions = [layer_type == SLIDING for layer_type in layer_types]
    if not len(layer_types) == len(has_positions) == model.num_layers:
        raise ConfigError(
            f"{model.name}: config.json describes {len(layer_types)} layers and has {model.num_layers}"
        )
    ropes_per_layer_type = _has_ropes_per_layer_type(hf)
    chunk = hf.get("attention_chunk_size") or 0
    sources, own_sizes = _kv_sources(model, layer_types), hf.get("per_layer_config") or {}
    own_sizes = {int(index): sizes for index, sizes in own_sizes.items()}
    widths = hf.get("layer_intermediate_sizes") or [None] * model.num_layers
    return tuple(
        LayerSpec(
            # A window or chunk that no sequence exceeds has no effect.
            window=window if layer_type == SLIDING and window < model.max_model_len else 0,
            chunk=chunk if layer_type == CHUNKED and chunk < model.max_model_len else 0,
            rope=(layer_type if ropes_per_layer_type else FULL) if has_position else None,
            has_experts=_is_mixture(hf, family) and _has_experts(hf, index),
            num_kv_heads=own_sizes.get(index, {}).get("num_key_value_heads"),
            head_dim=own_sizes.get(index, {}).get("head_dim"),
            intermediate_size=widths[index],
            kv_source=sources[index],
            values_are_keys=bool(hf.get("attention_k_eq_v")) and layer_type == FULL,
        )
        for index, (layer_type, has_position) in enumerate(zip(layer_types, has_positions, strict=True))
    )


def _kv_sources(model: ModelConfig, layer_types: list[str]) -> list[int | None]:
    """Return the layer whose keys and values each layer attends to, or None: the last one of the same type.

    Raises:
        ConfigError: there is no such layer.
    """
    num_own = model.num_layers - (model.hf.get("num_kv_shared_layers") or 0)
    last_of = {layer_type: index for index, layer_type in enumerate(layer_types[: max(num_own, 0)])}
    missing = sorted(set(layer_types) - set(last_of))
    if missing:
        raise ConfigError(
            f"{model.name}: num_kv_shared_layers leaves no layer of type {missing[0]!r} with keys and values"
        )
    return [None if index < num_own else last_of[kind] for index, kind in enumerate(layer_types)]


def _read_layer_types(model: ModelConfig, family: Family, window: int) -> list[str]:
    if family.all_layers_windowed:
        return [SLIDING if window else FULL] * model.num_layers
    layer_types: list[str] = model.hf.get("layer_types") or [FULL] * model.num_layers
    known = {FULL, SLIDING, CHUNKED} if model.hf.get("attention_chunk_size") else {FULL, SLIDING}
    unknown = sorted(set(layer_types) - known)
    if unknown:
        raise ConfigError(f"{model.name}: layers of type {unknown[0]!r} are not supported")
    return layer_types


def _is_mixture(hf: dict[str, Any], family: Family) -> bool:
    has_flag = family.experts_flag is None or bool(hf.get(family.experts_flag))
    return family.expert_fields is not None and has_flag


def _has_experts(hf: dict[str, Any], index: int) -> bool:
    if (listed := hf.get("moe_layers")) is not None:
        return index in listed
    first = hf.get("first_k_dense_replace") or hf.get("moe_layer_start_index") or 0
    last = hf.get("moe_layer_end_index", -1)
    if index < first or 0 <= last < index:
        return False
    step = hf.get("decoder_sparse_step") or hf.get("moe_layer_interval") or 1
    return index not in (hf.get("mlp_only_layers") or []) and (index + 1) % step == 0


def _read_experts(model: ModelConfig, family: Family) -> Experts | None:
    if family.expert_fields is None or not _is_mixture(model.hf, family):
        return None
    count_field, size_field = family.expert_fields
    # Newer configurations have num_local_experts, which transformers maps to the older name.
    count = model.hf.get(count_field) or _required(model, "num_local_experts")
    per_token = _uniform(model, family.per_token_field)
    if not 0 < per_token <= count:
        raise ConfigError(
            f"{model.name}: {family.per_token_field} is {per_token}, but it has {count} experts"
        )
    if model.hf.get("clip_qkv") is not None:
        raise ConfigError(f"{model.name}: bounded queries, keys and values (clip_qkv) are not supported")
    normalized = family.experts_normalized
    size = _required(model, size_field)
    experts = Experts(
        count,
        per_token,
        size,
        bool(model.hf.get("norm_topk_prob")) if normalized is None else normalized,
        shared_intermediate_size=size * (model.hf.get(family.shared_count_field) or 0)
        if family.shared_size_field is None
        else _required(model, family.shared_size_field),
    )
    experts = ROUTINGS[family.routing](experts, model.hf)
    _check_groups(model, experts)
    return experts


def _uniform(model: ModelConfig, field: str) -> Any:
    """Return a setting that some configurations have for each layer. Raises ConfigError if layers differ."""
    value = _required(model, field)
    if not isinstance(value, list):
        return value
    if not value or value.count(value[0]) != len(value):
        raise ConfigError(f"{model.name}: {field} differs between layers, which is not supported")
    return value[0]


def _check_groups(model: ModelConfig, experts: Experts) -> None:
    """Raise ConfigError unless each token finds its experts within its groups."""
    num_groups, num_top, count = experts.num_groups, experts.num_top_groups, experts.count
    if not 0 < num_top <= num_groups or count % num_groups:
        raise ConfigError(
            f"{model.name}: {count} experts cannot be chosen from {num_top} of {num_groups} equal groups"
        )
    if experts.per_token > count // num_groups * num_top:
        raise ConfigError(
            f"{model.name}: num_experts_per_tok is {experts.per_token}, but {num_top} groups have "
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


# Family.routing |-> function that adds the settings of a configuration.
ROUTINGS: dict[str, Callable[[Experts, dict[str, Any]], Experts]] = {
    "softmax": lambda experts, hf: experts,
    "group_limited": _group_limited_routing,
    "corrected_sigmoid": _corrected_sigmoid_routing,
    "gpt_oss": _gpt_oss_routing,
    "llama4": _llama4_routing,
    "corrected_softmax": lambda experts, hf: replace(experts, correction_bias=True),
    "beside_dense": lambda experts, hf: replace(experts, beside_dense=True),
    "gated_sharing": lambda experts, hf: replace(experts, shared_gate=True),
}


def _has_ropes_per_layer_type(hf: dict[str, Any]) -> bool:
    settings = hf.get("rope_parameters") or {}
    return any(isinstance(settings.get(kind), dict) for kind in (FULL, SLIDING))


def _read_ropes(model: ModelConfig, head_dims: dict[str, int]) -> dict[str, Rope]:
    """Read ``rope_parameters`` (Transformers 5; per layer type or for all) or ``rope_scaling``, ``rope_theta``.

    Args:
        head_dims: key |-> numbers of a head that has the rotary embedding.
    """
    hf = model.hf
    settings: dict[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    context = RopeContext(
        head_dim=model.head_dim,
        max_model_len=model.max_model_len,
        context_len=hf.get("max_position_embeddings") or model.max_model_len,
        original_len=hf.get("original_max_position_embeddings"),
        theta=hf.get("rope_theta") or DEFAULT_THETA,
        partial_rotary_factor=hf.get("partial_rotary_factor") or 1.0,
    )
    per_layer_type = _has_ropes_per_layer_type(hf)
    try:
        return {
            key: make_rope(settings[key] if per_layer_type else settings, replace(context, head_dim=head_dim))
            for key, head_dim in sorted(head_dims.items())
        }
    except KeyError as error:
        raise ConfigError(f"{model.name}: its rope settings lack layers of type {error}") from error
    except ValueError as error:
        raise ConfigError(f"{model.name}: {error}") from error
