"""Conversion of callers' values to plain Python: numpy's numbers and any sequences become int, float and tuple.

Each function takes the field's name, for the error, and the value, and raises InvalidType for a wrong type.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

from .errors import InvalidRequest, InvalidType

# msgpack holds integers from -_LIMIT to _LIMIT - 1.
_LIMIT = 1 << 63

# A forbidden word: text, or its token ids.
BadWord = str | tuple[int, ...]


def whole_number(field: str, given: Any) -> int:
    """Return an integer, also from numpy's types."""
    try:
        number = int(operator.index(given))
    except TypeError as error:
        raise InvalidType(field, f"is {_kind(given)}, must be a whole number") from error
    if not -_LIMIT <= number < _LIMIT:
        raise InvalidRequest(field, f"has {number.bit_length()} bits, must be a signed 64-bit number")
    return number


def real_number(field: str, given: Any) -> float:
    """Return a finite number; text is refused."""
    try:
        number = None if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError):
        number = None
    except OverflowError:
        number = math.inf
    if number is None:
        raise InvalidType(field, f"is {_kind(given)}, must be a finite number")
    if not math.isfinite(number):
        raise InvalidRequest(field, f"is {number}, must be a finite number")
    return number


def flag(field: str, given: Any) -> bool:
    """Return a bool; no other type is converted."""
    if not isinstance(given, bool | np.bool_):
        raise InvalidType(field, f"is {_kind(given)}, must be true or false")
    return bool(given)


def texts(field: str, given: Any) -> tuple[str, ...]:
    """Return a tuple of strings: of one for a single string, empty for None."""
    parts = _parts(field, given)
    for part in parts:
        if not isinstance(part, str):
            raise InvalidType(field, f"has an item {_kind(part)}, must have strings only")
    return parts


def token_ids(field: str, given: Any) -> tuple[int, ...]:
    """Return a tuple of integers; empty for None."""
    if isinstance(given, str):
        raise InvalidType(field, f"is {_kind(given)}, must be a list of token ids")
    parts = _parts(field, given)
    try:
        # Fast path for tens of thousands of ids; the slow path below names the wrong one.
        ids = tuple(map(operator.index, parts))
        if not ids or (min(ids) >= -_LIMIT and max(ids) < _LIMIT):
            return ids
    except TypeError:
        pass
    return tuple(whole_number(f"{field}[{index}]", part) for index, part in enumerate(parts))


def distinct_token_ids(field: str, given: Any) -> tuple[int, ...]:
    """Return a tuple of integers without repeats, in order of first occurrence."""
    return tuple(dict.fromkeys(token_ids(field, given)))


def bad_words(field: str, given: Any) -> tuple[BadWord, ...]:
    """Return a tuple of words, each as text or token ids: of one for a single text, empty for None."""
    return tuple(
        word if isinstance(word, str) else token_ids(f"{field}[{index}]", word)
        for index, word in enumerate(_parts(field, given))
    )


def biases(field: str, given: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and number, sorted by token id, from a mapping or pairs; empty for None."""
    items = given.items() if isinstance(given, Mapping) else _parts(field, given)
    bias_of: dict[int, float] = {}
    for item in items:
        try:
            token_id, bias = item
        except (TypeError, ValueError) as error:
            problem = f"has an item {_kind(item)}, must have pairs of token id and number"
            raise InvalidType(field, problem) from error
        token_id = whole_number(field, token_id)
        bias_of[token_id] = real_number(f"{field}[{token_id}]", bias)
    return tuple(sorted(bias_of.items()))


def json_arguments(field: str, given: Any) -> tuple[tuple[str, str], ...]:
    """Return pairs of name and JSON text, sorted by name, from a mapping of JSON values or from such pairs."""
    if not isinstance(given, Mapping):
        pairs = tuple((str(name), str(text)) for name, text in _parts(field, given))
        return tuple(sorted(pairs))
    encoded = []
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidType(field, f"has a name {_kind(name)}, must have text")
        try:
            encoded.append((name, json.dumps(value, allow_nan=False, separators=(",", ":"))))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidType(f"{field}[{name!r}]", f"is not a value of JSON: {error}") from None
    return tuple(sorted(encoded))


def _parts(field: str, given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    # A set has no order, and of a mapping only the keys would count.
    if not isinstance(given, Iterable) or isinstance(given, Set | Mapping | bytes):
        raise InvalidType(field, f"is {_kind(given)}, must be a list")
    return tuple(given)


def _kind(given: Any) -> str:
    """Return the value's type for an error; the value itself may be of any length."""
    return "None" if given is None else f"of type {type(given).__name__}"
