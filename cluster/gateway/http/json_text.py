"""JSON text, written fast: streams put strings between prepared bytes instead of encoding whole objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

# Returns a string as JSON with its quotes, in ASCII, so that lone surrogates can be sent as well. Is a C function.
quoted: Callable[[str], str] = encode_basestring_ascii


class JsonItems:
    """A list of one or more small items that are made as they are written, once: it never exists as a whole."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items


def _plain(value: object) -> list[Any]:
    assert isinstance(value, JsonItems), f"{type(value)} is no JSON"
    return list(value.items)


_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain)


def json_text(value: Any) -> str:
    """Return compact JSON in ASCII. Floats must be finite."""
    return _encoder.encode(value)
