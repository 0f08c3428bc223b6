"""Numbers of a spec, by the annotations of its fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from quire.proto.model.config_fields import MAX_NUMBER, check_numbers


@dataclass(frozen=True)
class Part:
    size: int = 1
    angles: tuple[float, ...] = (0.5, -1)


@dataclass(frozen=True)
class Whole:
    count: int = 0
    limit: int | None = None
    scale: float = 1.0
    clamp: tuple[float, float] | None = None
    name: str = "x"
    enabled: bool = False
    part: Part | None = None
    parts: tuple[Part, ...] = (Part(), Part())
    by_name: dict[str, Part] | None = None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"count": MAX_NUMBER, "limit": 3, "scale": -2, "clamp": (1, 2.5), "part": Part()},
        {"by_name": {"a": Part()}},
    ],
)
def test_numbers_of_their_types_pass(changes: dict[str, Any]) -> None:
    check_numbers(replace(Whole(), **changes))


@pytest.mark.parametrize("value", [None, "1", [1], {"a": 1}, (1,), 1.0, -1, MAX_NUMBER + 1])
def test_other_value_of_a_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Whole\.count is .*, must be a whole number from 0 to 2147483647"):
        check_numbers(Whole(count=value))


@pytest.mark.parametrize("value", [None, "1", [1], {"a": 1}, (1,), math.inf, math.nan, 1j])
def test_other_value_of_a_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Whole\.scale is .*, must be a finite number"):
        check_numbers(Whole(scale=value))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"clamp": (1, "x")}, "Whole.clamp"),
        ({"part": Part(-1)}, "Part.size"),
        ({"parts": (Part(), Part(1, (math.inf,)))}, "Part.angles"),
        ({"by_name": {"a": Part(), "b": Part(2.5)}}, "Part.size"),  # type: ignore[arg-type]
    ],
)
def test_numbers_in_parts_are_checked(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is "):
        check_numbers(replace(Whole(), **changes))
