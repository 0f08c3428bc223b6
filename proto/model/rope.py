"""Rotary position embedding: the frequencies of a configuration, as plain numbers.

The kinds are those of Hugging Face configurations: linear interpolation (Chen et al., 2023), NTK-aware scaling and
YaRN (Peng et al., 2023), Llama 3.1's blend by wavelength, and LongRoPE's factors found by search (Ding et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import first_line

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first ``2 * len(frequencies)`` dimensions of a head; the others are not rotated.

    Attributes:
        frequencies: radians per position, for each pair of dimensions.
        scale: multiplies cosines and sines.
        sections: pairs of dimensions that a token's time, row and column rotate; empty if a token has one position.
        interleaved_sections: the pairs of row and column alternate with those of time; otherwise the sections follow
            each other.
        exponents: name of a tensor of the checkpoint whose exponentials multiply the frequencies; empty for none.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False
    exponents: str = ""

    def axes(self) -> list[int]:
        """Return for each pair of dimensions whether a token's time, row or column (0, 1 or 2) rotates it."""
        if not self.sections:
            return [0] * len(self.frequencies)
        if not self.interleaved_sections:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        axes = [0] * len(self.frequencies)
        for axis in (1, 2):
            for pair in range(axis, min(3 * self.sections[axis], len(axes)), 3):
                axes[pair] = axis
        return axes


@dataclass(frozen=True, slots=True)
class RopeContext:
    """Model settings that the frequencies depend on, besides the rope settings.

    Attributes:
        head_dim: D.
        max_model_len: most tokens of a sequence.
        context_len: ``max_position_embeddings``.
        original_len: ``original_max_position_embeddings``, if it is outside of the rope settings.
        theta: base of the frequencies if the rope settings have none.
        partial_rotary_factor: fraction of a head that is rotated if the rope settings have none.
    """

    head_dim: int
    max_model_len: int
    context_len: int
    original_len: int | None = None
    theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0


def make_rope(settings: dict[str, Any], context: RopeContext) -> Rope:
    """Return the Rope of a ``rope_parameters`` or ``rope_scaling`` dictionary.

    Raises:
        ValueError: the rope type is unknown, or a setting that it needs is missing or malformed.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope scaling {kind!r:.100} is not supported; supported: {', '.join(_KINDS)}")
    try:
        theta = float(settings.get("rope_theta") or context.theta)
        if not 0 < theta < math.inf:
            raise ValueError(f"rope_theta is {theta:g}, must be above 0 and finite")
        share = settings.get("partial_rotary_factor", context.partial_rotary_factor)
        rotary_dim = int(context.head_dim * (1.0 if share is None else float(share)))
        if not 2 <= rotary_dim <= context.head_dim or rotary_dim % 2:
            raise ValueError(
                f"{rotary_dim} of {context.head_dim} dimensions, must be even, at least 2 and at most all"
            )
        frequencies = [theta ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]
        rope = _KINDS[kind](frequencies, theta, settings, context)
        rope = replace(rope, exponents=str(settings.get("exponents") or ""))
        return _with_sections(rope, settings) if settings.get("mrope_section") else rope
    except KeyError as error:
        raise ValueError(f"rope scaling {kind!r} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"rope scaling {kind!r} has invalid settings: {first_line(error)}") from error


def _with_sections(rope: Rope, settings: dict[str, Any]) -> Rope:
    sections = tuple(int(count) for count in settings["mrope_section"])
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != len(rope.frequencies):
        raise ValueError(
            f"mrope_section is {list(sections)}, must be three numbers of {len(rope.frequencies)} pairs together"
        )
    return replace(rope, sections=sections, interleaved_sections=bool(settings.get("mrope_interleaved")))


def _default(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    return Rope(tuple(frequencies))


def _dynamic(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Raise the base (NTK-aware) by as much as sequences may exceed the original context.

    transformers raises the base as a sequence grows. A cached key is rotated once, so all sequences have the base of
    the longest one that max_model_len allows, as in vLLM; up to the original context this is the model's own.
    Hunyuan's checkpoints have a fixed ``alpha`` instead.
    """
    rotary_dim = 2 * len(frequencies)
    if settings.get("alpha"):
        raised = float(settings["alpha"])
    else:
        factor = float(settings["factor"])
        raised = factor * max(1.0, context.max_model_len / context.context_len) - (factor - 1)
    # The new base to the power of -2 i / D is the old one's times this to the power of -i.
    growth = raised ** (2 / (rotary_dim - 2)) if rotary_dim > 2 else 1.0
    return Rope(tuple(frequency * growth**-pair for pair, frequency in enumerate(frequencies)))


def _linear(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    factor = float(settings["factor"])
    return Rope(tuple(frequency / factor for frequency in frequencies))


def _llama3(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Scale wavelengths above original_len / low, keep those below original_len / high, and blend in between."""
    factor = float(settings["factor"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    original_len = _original_len(settings, context)
    # Llama 4 Scout has equal bounds: nothing is blended.
    width = (high - low) or 1e-9
    kept = [_clamp((original_len * frequency / (2 * math.pi) - low) / width) for frequency in frequencies]
    return Rope(_blend(frequencies, kept, factor))


def _yarn(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Keep pairs that turn often within the original context, scale slow ones, and blend in between."""
    original_len = _original_len(settings, context)
    factor = settings["factor"]
    factor = context.context_len / original_len if factor is None else float(factor)
    rotary_dim = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(original_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(settings.get("beta_fast") or 32.0)
    last = pair_that_turns(settings.get("beta_slow") or 1.0)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = (last - first) or 0.001
    kept = [1 - _clamp((pair - first) / width) for pair in range(len(frequencies))]
    scale = settings.get("attention_factor")
    return Rope(
        _blend(frequencies, kept, factor), _yarn_scale(factor, settings) if scale is None else float(scale)
    )


def _yarn_scale(factor: float, settings: dict[str, Any]) -> float:
    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's scale of queries and keys for a context extended by `factor`, weighted by an ``mscale``."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Divide each frequency by its factor, from the long list if sequences may exceed the original context.

    A cached key is rotated once, so a sequence cannot switch lists when it grows beyond the original context. If
    max_model_len allows such sequences, all sequences use the long list.
    """
    original_len = _original_len(settings, context)
    name = "long_factor" if context.max_model_len > original_len else "short_factor"
    factors = [float(factor) for factor in settings[name]]
    if len(factors) != len(frequencies):
        raise ValueError(f"{name} has {len(factors)} numbers for {len(frequencies)} pairs")
    # Phi-MoE has a scale per list.
    scale = settings.get(name.replace("factor", "mscale"), settings.get("attention_factor"))
    if scale is None:
        stretch = settings.get("factor") or context.context_len / original_len
        scale = math.sqrt(1 + math.log(stretch) / math.log(original_len)) if stretch > 1 else 1.0
    pairs = zip(frequencies, factors, strict=True)
    return Rope(tuple(frequency / factor for frequency, factor in pairs), float(scale))


def _proportional(
    frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext
) -> Rope:
    """Rotate the first pairs of a head with the frequencies of the whole head, and no others (Gemma 4, 2026)."""
    factor, head_dim = float(settings.get("factor") or 1.0), context.head_dim
    rotated = [theta ** (-2 * pair / head_dim) / factor for pair in range(len(frequencies))]
    return Rope((*rotated, *[0.0] * (head_dim // 2 - len(rotated))))


_KINDS: dict[str, Callable[[list[float], float, dict[str, Any], RopeContext], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,
}


def _original_len(settings: dict[str, Any], context: RopeContext) -> int:
    return int(
        context.original_len or settings.get("original_max_position_embeddings") or context.context_len
    )


def _blend(frequencies: list[float], kept: list[float], factor: float) -> tuple[float, ...]:
    """Blend each frequency with the one divided by `factor`; `kept` is the weight of the original."""
    pairs = zip(frequencies, kept, strict=True)
    return tuple(share * frequency + (1 - share) * frequency / factor for frequency, share in pairs)


def _clamp(share: float) -> float:
    return min(max(share, 0.0), 1.0)
