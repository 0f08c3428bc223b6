"""What callers give as plain values: numbers and sequences of any kind become Python's own, or are refused.

Each function takes the name of the field, for the error, and what was given, and raises InvalidRequest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .errors import InvalidRequest

# Numbers below this, either way, are what the messages between processes can hold.
_LIMIT = 1 << 63

# A forbidden word: text, or once it is tokenised the ids that spell it.
BadWord = str | tuple[int, ...]


def whole_number(field: str, given: Any) -> int:
    """An integer, numpy's too."""
    try:
        number = int(operator.index(given))
    except TypeError as error:
        raise InvalidRequest(field, f"is {_kind(given)}, must be a whole number") from error
    if not -_LIMIT <= number < _LIMIT:
        raise InvalidRequest(field, f"has {number.bit_length()} bits, must be a signed 64-bit number")
    return number


def real_number(field: str, given: Any) -> float:
    """A finite number; text is none."""
    try:
        number = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        shown = number if isinstance(given, float) else _kind(given)
        raise InvalidRequest(field, f"is {shown}, must be a finite number")
    return number


def flag(field: str, given: Any) -> bool:
    """True or false; no other value stands for either."""
    if not isinstance(given, bool | np.bool_):
        raise InvalidRequest(field, f"is {_kind(given)}, must be true or false")
    return bool(given)


def texts(field: str, given: Any) -> tuple[str, ...]:
    """Strings; one alone is a tuple of one, and None of none."""
    parts = _parts(field, given)
    for part in parts:
        if not isinstance(part, str):
            raise InvalidRequest(field, f"has {_kind(part)} in it, must be of strings")
    return parts


def token_ids(field: str, given: Any) -> tuple[int, ...]:
    """Whole numbers; None is of none."""
    if isinstance(given, str | bytes):
        raise InvalidRequest(field, f"is {_kind(given)}, must be of token ids")
    parts = _parts(field, given)
    try:
        # There may be tens of thousands: one by one only to say which is wrong.
        ids = tuple(map(operator.index, parts))
        if not ids or (min(ids) >= -_LIMIT and max(ids) < _LIMIT):
            return ids
    except TypeError:
        pass
    return tuple(whole_number(f"{field}[{place}]", part) for place, part in enumerate(parts))


def distinct_token_ids(field: str, given: Any) -> tuple[int, ...]:
    """Whole numbers, each once, in the order of their first."""
    return tuple(dict.fromkeys(token_ids(field, given)))


def bad_words(field: str, given: Any) -> tuple[BadWord, ...]:
    """Words as text or token ids; one text alone is a tuple of one, and None of none."""
    return tuple(
        word if isinstance(word, str) else token_ids(f"{field}[{place}]", word)
        for place, word in enumerate(_parts(field, given))
    )


def biases(field: str, given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping or pairs of token ids and numbers, as pairs by token id; None is of none."""
    items = given.items() if isinstance(given, Mapping) else _parts(field, given)
    read: dict[int, float] = {}
    for item in items:
        try:
            token_id, bias = item
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                field, f"has {_kind(item)} in it, must be of token ids and numbers"
            ) from error
        token_id = whole_number(field, token_id)
        read[token_id] = real_number(f"{field}[{token_id}]", bias)
    return tuple(sorted(read.items()))


def _parts(field: str, given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise InvalidRequest(field, f"is {_kind(given)}, must be a list")
    return tuple(given)


def _kind(given: Any) -> str:
    """What it is, without showing it: it may be as long as it likes."""
    return "None" if given is None else f"of type {type(given).__name__}"
