"""ValueKind: a type of option values, and the forms in which people and files write them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from .units import parse_amount, parse_num_bytes

_FLAGS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A type of option values.

    Attributes:
        words: the type in errors, after "must be".
        read: plain value from TOML, JSON, Python or the command line |-> value. Raises ValueError on a value of
            another type, ConfigError on text that cannot be parsed.
        split: text of an environment variable |-> plain value. Raises ValueError.
        write: value |-> plain value for JSON and TOML.
        cli_type: the command line's type of the plain value.
        is_repeated: the command line takes the option several times, once per entry.
    """

    words: str
    read: Callable[[Any], Any]
    split: Callable[[str], Any] = str
    write: Callable[[Any], Any] = lambda value: value
    cli_type: type = str
    is_repeated: bool = False


def _read_integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(value)
    return int(value)


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(value)
    return float(value)


def _read_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def _split_flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(value)


def _read_path(value: Any) -> Path:
    if isinstance(value, str | os.PathLike):
        return Path(value).absolute()  # for processes with another working directory
    raise ValueError(value)


def _read_num_bytes(value: Any) -> int:
    return parse_num_bytes(value) if isinstance(value, str) else _read_integer(value)


INTEGER = ValueKind("a whole number", _read_integer, int, cli_type=int)
NUMBER = ValueKind("a number", _read_number, float, cli_type=float)
FLAG = ValueKind("true or false", _read_flag, _split_flag, cli_type=bool)
TEXT = ValueKind("text", _read_text)
PATH = ValueKind("a path", _read_path, write=str, cli_type=Path)
NUM_BYTES = ValueKind("a number of bytes, or text like 512MiB or 8GB", _read_num_bytes)

# annotation |-> the kind of an option that names no other
KIND_OF: Mapping[Any, ValueKind] = {int: INTEGER, float: NUMBER, bool: FLAG, str: TEXT, Path: PATH}


def amounts(noun: str, example: str) -> ValueKind:
    """Return the kind of ``((name, number), ...)``, in TOML a table, elsewhere ``NAME=NUMBER`` texts.

    Args:
        noun: one entry in errors, for example ``tenant weight``.
        example: an entry, for example ``gold=3``.
    """

    def read(value: Any) -> tuple[tuple[str, float], ...]:
        entries = value.items() if isinstance(value, Mapping) else value
        if isinstance(entries, str | bytes):
            raise ValueError(value)
        return tuple(read_entry(entry) for entry in entries)

    def read_entry(entry: Any) -> tuple[str, float]:
        if isinstance(entry, str):
            return parse_amount(entry, noun, example)
        name, amount = entry
        return _read_text(name), _read_number(amount)

    return ValueKind(
        "a table of names and numbers", read, lambda text: text.split(","), dict, is_repeated=True
    )
