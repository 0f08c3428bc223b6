"""Rotary position embedding: the frequencies that a configuration asks for, as plain numbers.

The kinds are those of Hugging Face configurations: linear interpolation (Chen et al., 2023), NTK-aware scaling and
YaRN (Peng et al., 2023), Llama 3.1's blend by wavelength, and LongRoPE's factors found by search (Ding et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates the first ``2 * len(frequencies)`` dimensions of a head; the others stay as they are.

    Attributes:
        frequencies: radians a position of each pair of dimensions.
        scale: multiplies cosines and sines.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeContext:
    """What the frequencies depend on beside their own settings.

    Attributes:
        head_dim: D.
        max_model_len: most tokens of a sequence.
        context_len: ``max_position_embeddings``.
        original_len: ``original_max_position_embeddings`` where the configuration has it beside the rope settings.
        theta: base of the frequencies where the settings have none.
        partial_rotary_factor: the share of a head that is rotated, likewise.
    """

    head_dim: int
    max_model_len: int
    context_len: int
    original_len: int | None = None
    theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0


def make_rope(settings: dict[str, Any], context: RopeContext) -> Rope:
    """The rope of one ``rope_parameters`` or ``rope_scaling`` dictionary.

    Raises:
        ValueError: an unknown kind, or a setting that the kind needs and that is missing or malformed.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    try:
        theta = float(settings.get("rope_theta") or context.theta)
        share = settings.get("partial_rotary_factor", context.partial_rotary_factor)
        rotary_dim = int(context.head_dim * (1.0 if share is None else float(share)))
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"{rotary_dim} of {context.head_dim} dimensions; it needs pairs")
        frequencies = [theta ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]
        return _KINDS[kind](frequencies, theta, settings, context)
    except KeyError as error:
        raise ValueError(f"rope scaling {kind!r} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"rope scaling {kind!r} has settings that mean nothing: {error}") from error


def _default(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Also ``dynamic``: its base grows only in sequences beyond the context, and none gets there."""
    return Rope(tuple(frequencies))


def _linear(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    factor = float(settings["factor"])
    return Rope(tuple(frequency / factor for frequency in frequencies))


def _llama3(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Wavelengths above original_len / low are stretched, below original_len / high left, blended in between."""
    factor = float(settings["factor"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    original_len = _original_len(settings, context)
    kept = [
        _clamp((original_len * frequency / (2 * math.pi) - low) / (high - low)) for frequency in frequencies
    ]
    return Rope(_blend(frequencies, kept, factor))


def _yarn(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """Pairs that turn often enough within the original context are left, slow ones are stretched."""
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

    def scale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale_of(mscale) / scale_of(mscale_all_dim) if mscale and mscale_all_dim else scale_of(1.0)


def _longrope(frequencies: list[float], theta: float, settings: dict[str, Any], context: RopeContext) -> Rope:
    """One factor a pair, from one of two lists: which one is a matter of the longest sequence that is served.

    A cached key is rotated once, so a sequence that grows beyond the original context cannot change lists as it
    would have to: where such sequences are allowed, all have the long list's factors.
    """
    original_len = _original_len(settings, context)
    name = "long_factor" if context.max_model_len > original_len else "short_factor"
    factors = [float(factor) for factor in settings[name]]
    if len(factors) != len(frequencies):
        raise ValueError(f"{name} has {len(factors)} numbers for {len(frequencies)} pairs")
    scale = settings.get("attention_factor")
    if scale is None:
        stretch = settings.get("factor") or context.context_len / original_len
        scale = math.sqrt(1 + math.log(stretch) / math.log(original_len)) if stretch > 1 else 1.0
    pairs = zip(frequencies, factors, strict=True)
    return Rope(tuple(frequency / factor for frequency, factor in pairs), float(scale))


_KINDS: dict[str, Callable[[list[float], float, dict[str, Any], RopeContext], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _original_len(settings: dict[str, Any], context: RopeContext) -> int:
    return int(
        context.original_len or settings.get("original_max_position_embeddings") or context.context_len
    )


def _blend(frequencies: list[float], kept: list[float], factor: float) -> tuple[float, ...]:
    """Each frequency, of which the share `kept` is left and the rest divided by `factor`."""
    pairs = zip(frequencies, kept, strict=True)
    return tuple(share * frequency + (1 - share) * frequency / factor for frequency, share in pairs)


def _clamp(share: float) -> float:
    return min(max(share, 0.0), 1.0)
