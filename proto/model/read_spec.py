"""The DecoderSpec of an architecture, read from a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .config_fields import required
from .family import Family
from .mtp_layouts import mtp_prefixes
from .read_experts import has_experts, is_mixture, read_experts
from .rope import DEFAULT_THETA, Rope, RopeContext, make_rope, yarn_scale
from .spec import (
    CHUNKED,
    FULL,
    SLIDING,
    AltUp,
    ArchitectureTraits,
    DecoderSpec,
    IndexerSpec,
    LayerSpec,
    MlaSpec,
    PerLayerInputs,
    QueryTemperature,
)

# Activation in a Hugging Face configuration |-> name in DecoderSpec.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Further ones of feed-forward networks that are not gated.
UNGATED_ACTIVATIONS = {"relu2": "relu_squared"}


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
            f"{model.name}: {family.activation_field} {activation!r:.100} is not supported, only {known}"
        )
    latent = _read_latent(model, family) if family.is_latent else None
    layers = _read_layers(model, family)
    qk_rope_head_dim = None if latent is None else latent.qk_rope_head_dim
    ropes = _read_ropes(
        model,
        {
            layer.rope: qk_rope_head_dim or layer.head_dim or model.head_dim
            for layer in layers
            if layer.rope is not None
        },
    )
    return DecoderSpec(
        vocab_size=model.vocab_size,
        hidden_size=required(model, "hidden_size"),
        intermediate_size=required(model, "intermediate_size"),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_eps=required(model, family.eps_field),
        layers=layers,
        ropes=ropes,
        attention_scale=_attention_scale(model) if latent is None else _latent_scale(model, latent),
        activation=activations[activation],
        attention_soft_cap=hf.get("attn_logit_softcapping") or 0.0,
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=bool(hf.get(family.mlp_bias_field)),
        qk_norm=family.qk_norm if has_qk_norm else None,
        norms=replace(family.norms, before_mlp=None) if is_parallel else family.norms,
        norm_offset=1.0 if family.is_gemma else family.norm_offset,
        parallel_residual=is_parallel,
        embedding_scale=model.hf["hidden_size"] ** 0.5
        if family.is_gemma
        else hf.get("embedding_multiplier", 1.0),
        residual_scale=hf.get("residual_multiplier", 1.0),
        logits_scale=hf.get("logit_scale") or 1.0 / hf.get("logits_scaling", 1.0),
        experts=read_experts(model, family),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        draft_prefixes=mtp_prefixes(model),
        latent=latent,
        head_bias=family.head_bias
        if family.head_bias_field is None
        else bool(hf.get(family.head_bias_field)),
        query_temperature=_read_temperature(hf),
        per_layer_inputs=_read_per_layer_inputs(hf),
        altup=_read_altup(hf),
        **{trait.name: getattr(family, trait.name) for trait in fields(ArchitectureTraits)},
    )


def read_layers(model: ModelConfig, family: Family) -> tuple[LayerSpec, ...]:
    """Return each layer's window, positions and experts. Raises ConfigError if an option is not supported."""
    return _read_layers(_adapted(model, family), family)


def _adapted(model: ModelConfig, family: Family) -> ModelConfig:
    return model if family.adapt is None else replace(model, hf=family.adapt(model.hf))


def _read_temperature(hf: dict[str, Any]) -> QueryTemperature | None:
    """Return that of Llama 4, or of Ministral 3, which has it among its rope settings."""
    if hf.get("attn_temperature_tuning"):
        return QueryTemperature(float(hf["attn_scale"]), float(hf["floor_scale"]))
    rope: dict[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not (scale := rope.get("llama_4_scaling_beta")):
        return None
    interval: Any = rope.get("original_max_position_embeddings")
    return QueryTemperature(float(scale), float(interval), offset=0, of_rotated=True)


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


def _attention_scale(model: ModelConfig) -> float:
    if (scale := model.hf.get("attention_multiplier")) is not None:
        return float(scale)
    return float((model.hf.get("query_pre_attn_scalar") or model.head_dim) ** -0.5)


def _read_latent(model: ModelConfig, family: Family) -> MlaSpec:
    hf = model.hf
    if hf.get("attention_bias"):
        raise ConfigError(f"{model.name}: biases of latent attention (attention_bias) are not supported")
    latent = MlaSpec(
        rank=required(model, "kv_lora_rank"),
        query_rank=hf.get("q_lora_rank"),
        qk_nope_head_dim=required(model, "qk_nope_head_dim"),
        qk_rope_head_dim=required(model, "qk_rope_head_dim"),
        v_head_dim=required(model, "v_head_dim"),
        interleaved=bool(hf.get("rope_interleave", True)),
        indexer=_read_indexer(model, family) if family.has_indexers else None,
    )
    if latent.v_head_dim > latent.qk_dim:
        raise ConfigError(
            f"{model.name}: v_head_dim is {latent.v_head_dim}, must be at most qk_nope_head_dim + qk_rope_head_dim, "
            f"{latent.qk_dim}"
        )
    return latent


def _read_indexer(model: ModelConfig, family: Family) -> IndexerSpec:
    required(model, "q_lora_rank")
    indexer = IndexerSpec(
        num_heads=required(model, "index_n_heads"),
        head_dim=required(model, "index_head_dim"),
        top_k=required(model, "index_topk"),
        interleaved=bool(model.hf.get("indexer_rope_interleave", family.indexer_interleaved)),
    )
    for field, value, least in (
        ("index_n_heads", indexer.num_heads, 1),
        ("index_head_dim", indexer.head_dim, required(model, "qk_rope_head_dim")),
        ("index_topk", indexer.top_k, 1),
    ):
        if value < least:
            raise ConfigError(f"{model.name}: {field} is {value}, must be at least {least}")
    return indexer


def _read_indexer_layers(model: ModelConfig, family: Family) -> list[bool]:
    """Return which layers have an indexer."""
    if not family.has_indexers:
        return [False] * model.num_layers
    kinds = model.hf.get("indexer_types") or ["full"] * model.num_layers
    if len(kinds) < model.num_layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(
            f"{model.name}: indexer_types is {kinds!r}, must name 'full' or 'shared' for each of "
            f"{model.num_layers} layers, and 'full' for the first"
        )
    return [kind == "full" for kind in kinds]


def _latent_scale(model: ModelConfig, latent: MlaSpec) -> float:
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
    has_indexer = _read_indexer_layers(model, family)
    return tuple(
        LayerSpec(
            # A window or chunk that no sequence exceeds has no effect.
            window=window if layer_type == SLIDING and window < model.max_model_len else 0,
            chunk=chunk if layer_type == CHUNKED and chunk < model.max_model_len else 0,
            rope=(layer_type if ropes_per_layer_type else FULL) if has_position else None,
            has_experts=is_mixture(hf, family) and has_experts(hf, index),
            num_kv_heads=own_sizes.get(index, {}).get("num_key_value_heads"),
            head_dim=own_sizes.get(index, {}).get("head_dim"),
            intermediate_size=widths[index],
            kv_source=sources[index],
            values_are_keys=bool(hf.get("attention_k_eq_v")) and layer_type == FULL,
            has_indexer=has_indexer[index],
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
    if family.has_indexers:
        return [FULL] * model.num_layers  # the configuration has the kind of their cache
    layer_types: list[str] = model.hf.get("layer_types") or [FULL] * model.num_layers
    known = {FULL, SLIDING, CHUNKED} if model.hf.get("attention_chunk_size") else {FULL, SLIDING}
    unknown = sorted(set(layer_types) - known)
    if unknown:
        raise ConfigError(f"{model.name}: layers of type {unknown[0]!r} are not supported")
    return layer_types


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
