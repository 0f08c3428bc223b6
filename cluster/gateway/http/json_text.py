"""JSON text, written fast: streams put strings between prepared bytes instead of encoding whole objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

# Returns a string as JSON with its quotes, in ASCII, so that lone surrogates can be sent as well. Is a C function.
quoted: Callable[[str], str] = encode_basestring_ascii

_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def json_text(value: Any) -> str:
    """Return compact JSON in ASCII. Floats must be finite."""
    return _encoder.encode(value)
