"""Amounts as people write them."""

from __future__ import annotations

import re
from contextlib import suppress

from ...proto.errors import ConfigError


def parse_num_bytes(text: str) -> int:
    """``512MiB``, ``8GB`` or plain bytes. Raises ConfigError on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"amount of memory is {text!r}, must be like 512MiB, 8GB or 1000000")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parse_amount(text: str, what: str, example: str) -> tuple[str, float]:
    """``NAME=NUMBER``. Raises ConfigError on anything else, with an example."""
    name, _, number = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(number)
    raise ConfigError(f"{what} is {text!r}, must be like {example}")
