"""Parsers of amounts in text: bytes, and NAME=NUMBER."""

from __future__ import annotations

import re
from contextlib import suppress

from ...proto.errors import ConfigError


def parse_num_bytes(text: str) -> int:
    """Parse ``512MiB``, ``8GB`` or a plain number of bytes. Raises ConfigError on other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"amount of memory is {text!r}, must be like 512MiB, 8GB or 1000000")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parse_amount(text: str, noun: str, example: str) -> tuple[str, float]:
    """Parse ``NAME=NUMBER``.

    Args:
        noun: the subject of the error message.
        example: correct text, for the error message.

    Raises:
        ConfigError: the text has another form.
    """
    name, _, number = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(number)
    raise ConfigError(f"{noun} is {text!r}, must be like {example}")
