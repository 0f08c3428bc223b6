"""Checks of option values: each maps a value to the words for what is allowed, or to None if it is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# (name, value) |-> the problem as one sentence; None if the value is allowed. The value is never None.
Check = Callable[[str, Any], str | None]


@dataclass(frozen=True, slots=True)
class Range:
    """Values for which `holds` is true.

    Attributes:
        words: the condition after "must be", for example ``above 0``.
    """

    holds: Callable[[Any], bool]
    words: str

    def __call__(self, name: str, value: Any) -> str | None:
        return None if self.holds(value) else f"{name} is {show(value)}, must be {self.words}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A fixed set of texts."""

    choices: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str | None:
        return None if value in self.choices else f"{name} is {value!r}, must be {in_words(self.choices)}"


def positive_amounts(name: str, value: Sequence[tuple[str, float]]) -> str | None:
    """Check named numbers: each name once, each number finite and above 0."""
    names = [key for key, _ in value]
    for key, amount in value:
        if not key:
            return f"{name} has {show(amount)} without a name, must be NAME=NUMBER"
        if names.count(key) > 1:
            return f"{name} has {key!r} {names.count(key)} times, must have it once"
        if not 0 < amount < math.inf:
            return f"{name} has {show(amount)} for {key!r}, must be above 0 and finite"
    return None


def bearer_token(name: str, value: str) -> str | None:
    """Check a secret, without showing it."""
    if value and value.isascii() and value.isprintable() and " " not in value:
        return None
    return f"{name} is not usable as a token, must be printable ASCII text without spaces"


def web_origins(name: str, value: str) -> str | None:
    """Check the origins of web pages, separated by commas."""
    for origin in value.split(","):
        if origin != "*" and not re.fullmatch(r"https?://[^/\s*,]+", origin):
            return (
                f"{name} has {origin!r}, must be * or origins like https://example.com, separated by commas"
            )
    return None


def processor_names(name: str, value: str) -> str | None:
    """Check names of logits processors, separated by commas."""
    names = value.split(",")
    for each in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", each):
            return f"{name} has {each!r}, must be a name of up to 64 letters, digits, '_', '.' and '-'"
        if names.count(each) > 1:
            return f"{name} has {each!r} {names.count(each)} times, must have it once"
    return None


positive = Range(lambda value: value > 0, "above 0")
positive_finite = Range(lambda value: 0 < value < math.inf, "above 0 and finite")
not_negative_finite = Range(lambda value: 0 <= value < math.inf, "at least 0 and finite")
share = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")


def at_least(low: int) -> Range:
    return Range(lambda value: bool(value >= low), f"at least {low}")


def positive_up_to(high: int) -> Range:
    return Range(lambda value: bool(0 < value <= high), f"above 0 and at most {high}")


def between(low: float, high: float) -> Range:
    return Range(lambda value: bool(low <= value <= high), f"from {low:g} to {high:g}")


def one_of(*choices: str) -> OneOf:
    return OneOf(choices)


def show(value: Any) -> str:
    """Return the value as errors show it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def in_words(choices: Sequence[str]) -> str:
    """Return ``a, b or c``."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
