"""The DecoderSpec of an architecture, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .attention import CHUNKED, FULL, SLIDING, AttentionSpec, QueryTemperature
from .config_fields import required
from .experts import has_experts, read_experts
from .family import Family
from .mla import UNROTATED, MlaSpec, read_indexer_layers, read_mla
from .mtp_layouts import mtp_prefixes
from .rope import DEFAULT_THETA, Rope, RopeContext, make_rope
from .spec import DecoderSpec, LayerSpec, MlpSpec, attention_of

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
    hf, fields = model.hf, family.fields
    is_parallel = family.parallel_residual or bool(hf.get("use_parallel_residual"))
    activation = _read_activation(model, family)
    layers = _read_layers(model, family)
    return DecoderSpec(
        vocab_size=model.vocab_size,
        ropes=_read_ropes(model, layers),
        hidden_size=required(model, "hidden_size"),
        intermediate_size=required(model, "intermediate_size"),
        norm_eps=required(model, fields.eps),
        layers=layers,
        activation=activation,
        norms=replace(family.norms, before_mlp=None) if is_parallel else family.norms,
        parallel_residual=is_parallel,
        normalizes_embeddings=family.normalizes_embeddings,
        embedding_scale=hf.get("embedding_multiplier", 1.0),
        residual_scale=hf.get("residual_multiplier", 1.0),
        logits_scale=hf.get("logit_scale") or 1.0 / hf.get("logits_scaling", 1.0),
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        experts=None
        if family.experts is None
        else read_experts(model, family.experts, has_bias=bool(hf.get(fields.mlp_bias))),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        head_bias=fields.head_bias is not None and bool(hf.get(fields.head_bias)),
        draft_prefixes=mtp_prefixes(model)
        + family.unused_prefixes
        + (() if family.read_unused is None else family.read_unused(hf)),
        names=family.names,
        variant=None if family.read_variant is None else family.read_variant(hf),
    )


def _adapted(model: ModelConfig, family: Family) -> ModelConfig:
    return model if family.adapt is None else replace(model, hf=family.adapt(model.hf))


def _read_activation(model: ModelConfig, family: Family) -> str:
    field = family.fields.activation
    activation = model.hf.get(field) or "silu"
    activations = ACTIVATIONS | (UNGATED_ACTIVATIONS if family.mlp_names is not None else {})
    if activation not in activations:
        known = ", ".join(repr(name) for name in activations)
        raise ConfigError(f"{model.name}: {field} {activation!r:.100} is not supported, only {known}")
    return activations[activation]


def _read_layers(model: ModelConfig, family: Family) -> tuple[LayerSpec, ...]:
    """Return the layers, described by the fields of all families."""
    hf = model.hf
    mlp = MlpSpec(
        required(model, "intermediate_size"),
        bool(hf.get(family.fields.mlp_bias)),
        family.mlp_names,
        family.fused_gate_up,
    )
    is_mixture = family.experts is not None and family.experts.is_mixture(hf)
    layers = [
        LayerSpec(mixer, mlp, has_experts=is_mixture and has_experts(hf, index))
        for index, mixer in enumerate(_read_mixers(model, family))
    ]
    return tuple(layers if family.change_layers is None else family.change_layers(model, layers))


def _read_mixers(model: ModelConfig, family: Family) -> Sequence[AttentionSpec | MlaSpec]:
    hf = model.hf
    window = (hf.get("sliding_window") or 0) if hf.get("use_sliding_window", True) else 0
    layer_types = _read_layer_types(model, family, window)
    if hf.get("use_bidirectional_attention") and not model.sees_whole_prompt:
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
    if family.is_latent:
        temperature, _ = _read_temperature(hf)
        mla = replace(read_mla(model, family.indexer_interleaved), temperature=temperature)
        is_sparse = family.indexer_interleaved is not None
        has_indexer = read_indexer_layers(model) if is_sparse else [False] * model.num_layers
        return [replace(mla, has_indexer=own) for own in has_indexer]
    attention, (temperature, is_for_rotated) = _read_attention(model, family), _read_temperature(hf)
    per_layer_type, chunk = _has_ropes_per_layer_type(hf), hf.get("attention_chunk_size") or 0
    return [
        replace(
            attention,
            # A window or chunk that no sequence exceeds has no effect.
            window=window if layer_type == SLIDING and window < model.max_model_len else 0,
            chunk=chunk if layer_type == CHUNKED and chunk < model.max_model_len else 0,
            rope=(layer_type if per_layer_type else FULL) if has_position else None,
            temperature=temperature if is_for_rotated == bool(has_position) else None,
        )
        for layer_type, has_position in zip(layer_types, has_positions, strict=True)
    ]


def _read_attention(model: ModelConfig, family: Family) -> AttentionSpec:
    """Return the attention of all layers but for their windows and positions."""
    hf, fields = model.hf, family.fields
    qkv_bias, output_bias = bool(family.qkv_bias), False
    if family.qkv_bias is None:
        qkv_bias = bool(hf.get(fields.qkv_bias))
        output_bias = fields.output_bias is not None and bool(hf.get(fields.output_bias))
    if (scale := hf.get("attention_multiplier")) is None:
        scale = (hf.get("query_pre_attn_scalar") or model.head_dim) ** -0.5
    has_qk_norm = fields.qk_norm is None or bool(hf.get(fields.qk_norm))
    return AttentionSpec(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        float(scale),
        soft_cap=hf.get("attn_logit_softcapping") or 0.0,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        has_sinks=family.has_sinks,
        qk_norm=family.qk_norm if has_qk_norm else None,
        fused_qkv=family.fused_qkv,
        interleaved=family.interleaved_rope,
    )


def _read_temperature(hf: dict[str, Any]) -> tuple[QueryTemperature | None, bool]:
    """Return the temperature, and whether it is that of layers with positions.

    Llama 4 has it in the other layers. Ministral 3 has it among its rope settings.
    """
    if hf.get("attn_temperature_tuning"):
        return QueryTemperature(float(hf["attn_scale"]), float(hf["floor_scale"])), False
    rope: dict[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not (scale := rope.get("llama_4_scaling_beta")):
        return None, True
    interval: Any = rope.get("original_max_position_embeddings")
    return QueryTemperature(float(scale), float(interval), offset=0), True


def _read_layer_types(model: ModelConfig, family: Family, window: int) -> list[str]:
    if family.all_layers_windowed:
        return [SLIDING if window else FULL] * model.num_layers
    if family.indexer_interleaved is not None:
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


def _read_ropes(model: ModelConfig, layers: Sequence[LayerSpec]) -> dict[str, Rope]:
    """Read ``rope_parameters`` (Transformers 5; per layer type or for all) or ``rope_scaling``, ``rope_theta``."""
    head_dims = {
        mixer.rope: mixer.qk_rope_head_dim if isinstance(mixer, MlaSpec) else mixer.head_dim
        for mixer in (attention_of(layer.mixer) for layer in layers)
        if mixer is not None and mixer.rope is not None
    }
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
            key: Rope((0.0,) * (head_dim // 2))
            if key == UNROTATED
            else make_rope(settings[key] if per_layer_type else settings, replace(context, head_dim=head_dim))
            for key, head_dim in sorted(head_dims.items())
        }
    except KeyError as error:
        raise ConfigError(f"{model.name}: its rope settings lack layers of type {error}") from error
    except ValueError as error:
        raise ConfigError(f"{model.name}: {error}") from error
