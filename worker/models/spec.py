"""DecoderSpec: all in which the models of the Llama family differ, read from a Hugging Face configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError

DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        kind: ``default``, ``linear`` or ``llama3``.
        theta: the base of the frequencies.
        factor: by how much positions are stretched, linear and llama3.
        low_freq_factor, high_freq_factor, original_len: llama3's: wavelengths above original_len /
            low_freq_factor are stretched, below original_len / high_freq_factor left, and blended in between.
    """

    kind: str = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians a position of each of the D/2 pairs."""
        frequencies = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in frequencies]
        if self.kind == "llama3":
            return [self._blend(frequency) for frequency in frequencies]
        return frequencies

    def _blend(self, frequency: float) -> float:
        turns = self.original_len * frequency / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / self.factor


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder in numbers; the sizes are those of the whole model, not of a rank's shard."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes beyond its configuration.

    Attributes:
        qkv_bias: biases of the q, k and v projections; None: ``attention_bias`` says, for the output too.
        qk_norm: queries and keys are normalised per head before the rotation.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False


def read_spec(model: ModelConfig, family: Family) -> DecoderSpec:
    """The model's DecoderSpec.

    Raises:
        ConfigError: the configuration asks for something that the decoder does not compute; names it.
    """
    hf = model.hf
    _refuse_unknown_features(model)
    attention_bias = bool(hf.get("attention_bias", False)) if family.qkv_bias is None else False
    return DecoderSpec(
        vocab_size=model.vocab_size,
        hidden_size=_required(model, "hidden_size"),
        intermediate_size=_required(model, "intermediate_size"),
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_eps=_required(model, "rms_norm_eps"),
        rope=_read_rope(model),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def _required(model: ModelConfig, field: str) -> Any:
    if model.hf.get(field) is None:
        raise ConfigError(f"{model.name}: its config.json lacks {field!r}")
    return model.hf[field]


def _refuse_unknown_features(model: ModelConfig) -> None:
    hf = model.hf
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"{model.name}: hidden_act {hf['hidden_act']!r} is not supported, only 'silu'")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(f"{model.name}: quantized weights ({method}) are not supported")
    if model.head_dim % 2:
        raise ConfigError(f"{model.name}: head_dim {model.head_dim} is odd; rotary embedding needs pairs")
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
    if window is not None and window < model.max_model_len:
        raise ConfigError(
            f"{model.name}: attention with a sliding window of {window} tokens is not supported; "
            f"give a max_model_len of at most {window} (it is {model.max_model_len})"
        )


def _read_rope(model: ModelConfig) -> RopeSpec:
    """Transformers 5 writes ``rope_parameters``; older files have ``rope_scaling`` and ``rope_theta``."""
    hf = model.hf
    settings: dict[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if any(isinstance(value, dict) for value in settings.values()):
        raise ConfigError(f"{model.name}: rope settings per kind of layer are not supported")
    if settings.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{model.name}: partial_rotary_factor other than 1 is not supported")
    theta = settings.get("rope_theta", hf.get("rope_theta", DEFAULT_ROPE_THETA))
    try:
        return _ROPE_KINDS[kind](float(theta), settings)
    except KeyError as error:
        if kind in _ROPE_KINDS:
            raise ConfigError(f"{model.name}: rope scaling {kind!r} lacks {error}") from error
        known = ", ".join(_ROPE_KINDS)
        raise ConfigError(
            f"{model.name}: rope scaling {kind!r} is not supported; supported: {known}"
        ) from error


_ROPE_KINDS = {
    "default": lambda theta, settings: RopeSpec("default", theta),
    "linear": lambda theta, settings: RopeSpec("linear", theta, settings["factor"]),
    "llama3": lambda theta, settings: RopeSpec(
        "llama3",
        theta,
        settings["factor"],
        settings["low_freq_factor"],
        settings["high_freq_factor"],
        settings["original_max_position_embeddings"],
    ),
}
