"""Checks that narrow the type of a value inside an expression."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return the value, which must not be None."""
    assert value is not None
    return value


def instance_of(kind: type[T], value: object) -> T:
    """Return the value, which must be an instance of `kind`."""
    assert isinstance(value, kind), f"{value!r} is no {kind.__name__}"
    return value
