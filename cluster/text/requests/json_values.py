"""Checks of texts and of JSON values that callers send, and of the number of values before a text is parsed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....proto.errors import InvalidRequest

MAX_DEPTH = 64
MAX_VALUES = 100_000
MAX_CHARS = 4 << 20
_MAX_INTEGER_BITS = 63
MAX_SHOWN_CHARS = 64
_CONTAINERS = (dict, list)


# Texts and lists or objects together: a conversation of 4,096 messages has 20,481.
MAX_PARTS = 32_768
# Numbers in lists: a prompt of token ids.
MAX_ITEMS = 524_288
# They hold 16,384 texts at most, which are counted in 5 ms.
_PIECE_BYTES = 32 << 10
# Possessive, so that no text is looked at twice. If a text goes on after the chunk, group 1 is the end of the chunk,
# nothing or a backslash, instead of the closing quote.
_REST_OF_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)', re.DOTALL)
_TEXT = re.compile(b'"' + _REST_OF_TEXT.pattern, re.DOTALL)


def check_text(field: str, text: object, max_chars: int | None = None) -> None:
    """Raises InvalidRequest if this is no text, is too long, or cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"is {show_value(text)}, must be text")
    if max_chars is not None and len(text) > max_chars:
        raise InvalidRequest(field, f"has {len(text)} characters, at most {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode text at character {error.start}") from error


def to_plain(value: Any) -> Any:
    """Return a checked JSON value as dictionaries, lists and scalars of no other types."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): to_plain(member) for name, member in value.items()}
    if isinstance(value, Sequence):
        return [to_plain(member) for member in value]
    return value


def check_mapping(field: str, value: object) -> Mapping[str, Any]:
    """Return the value. Raises InvalidRequest if it is no mapping with texts as keys."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, f"is {show_value(value)}, must be an object")
    _check_room(field, len(value))
    for name in value:
        check_text(f"{field}: the name {show_value(name)}", name)
    return value


def check_count(field: str, values: object, least: int, most: int) -> None:
    """Raises InvalidRequest if this is no list with so many values."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InvalidRequest(field, f"is {show_value(values)}, must be a list")
    if not least <= len(values) <= most:
        raise InvalidRequest(field, f"are {len(values)}, must be {least} to {most}")


def show_value(value: object) -> str:
    """Return a value as errors show it: scalars and the beginning of a text; of others the kind."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN_CHARS else f"{value[:MAX_SHOWN_CHARS]!r}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= _MAX_INTEGER_BITS else "a very large integer"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} members"
    return f"a list of {len(value)}" if isinstance(value, list | tuple) else f"of type {type(value).__name__}"


def check_json(field: str, value: Any) -> None:
    """Raises InvalidRequest if this is no JSON value, or is too large. Numbers must be finite."""
    num_values = num_chars = 0
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        each, depth = pending.pop()
        num_values += 1
        if isinstance(each, str):
            check_text(field, each)
            num_chars += len(each)
        elif isinstance(each, Mapping):
            _check_room(field, num_values + len(pending) + len(each))
            for name in each:
                check_text(field, name)
                num_chars += len(name)
            pending += ((member, depth + 1) for member in each.values())
        elif isinstance(each, Sequence) and not isinstance(each, bytes | bytearray | memoryview):
            _check_room(field, num_values + len(pending) + len(each))
            pending += ((member, depth + 1) for member in each)
        else:
            _check_scalar(field, each)
        if depth > MAX_DEPTH:
            raise InvalidRequest(field, f"is nested deeper than {MAX_DEPTH} levels")
        if num_chars > MAX_CHARS:
            raise InvalidRequest(field, f"has more than {MAX_CHARS} characters")


def has_more_values(value: Any, most: int) -> bool:
    """Return whether a parsed JSON value holds more values than `most`, at a cost of 30 ns for each."""
    num_values, pending = 0, [value] if isinstance(value, _CONTAINERS) else []
    while pending and num_values <= most:
        each = pending.pop()
        num_values += len(each)
        if num_values <= most:
            members = each.values() if isinstance(each, dict) else each
            pending += [member for member in members if isinstance(member, _CONTAINERS)]
    return num_values > most


def _check_scalar(field: str, value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field, f"has {value}, must be finite numbers only")
    elif not isinstance(value, int):
        raise InvalidRequest(field, f"has a value {show_value(value)}, must be JSON values only")
    elif value.bit_length() > _MAX_INTEGER_BITS:
        raise InvalidRequest(
            field, f"has an integer of {value.bit_length()} bits, at most {_MAX_INTEGER_BITS}"
        )


def _check_room(field: str, num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise InvalidRequest(field, f"has more than {MAX_VALUES} values")


class JsonSize:
    """Counts the values of a JSON document that arrives in chunks. What is no JSON is counted somehow.

    Parsing holds the interpreter, and so every stream of the gateway. 16 MB take 20 ms if they are one text, and 4 MB
    take 240 ms if they are 1.3 million empty lists (AMD EPYC, one core).

    Args:
        max_parts: texts and lists of a document that is not too large.

    Attributes:
        num_parts: texts, keys included, lists and objects.
        num_items: commas outside of texts, about the number of values.
    """

    def __init__(self, max_parts: int = MAX_PARTS) -> None:
        self._max_parts = max_parts
        self.num_parts = 0
        self.num_items = 0
        self._is_in_text = False
        self._escape = b""  # a backslash at the end of the last chunk

    @property
    def is_too_large(self) -> bool:
        return self.num_parts > self._max_parts or self.num_items > MAX_ITEMS

    @property
    def limits(self) -> str:
        """The limits as errors name them."""
        return f"{self._max_parts} texts and lists, or {MAX_ITEMS} numbers"

    def add(self, chunk: bytes) -> None:
        """Count a chunk, or its beginning if there are too many values."""
        for start in range(0, len(chunk), _PIECE_BYTES):
            if not self.is_too_large:
                self._add_piece(chunk[start : start + _PIECE_BYTES])

    def _add_piece(self, chunk: bytes) -> None:
        chunk, self._escape = self._escape + chunk, b""
        if self._is_in_text:
            rest = _REST_OF_TEXT.match(chunk)
            assert rest is not None, "the expression matches every chunk"
            self._end_text(rest[1])
            chunk = chunk[rest.end() :]
        # Each text is replaced by its closing quote, or by what stands for it.
        outside, num_texts = _TEXT.subn(rb"\1", chunk)
        if num_texts > outside.count(b'"'):
            self._end_text(b"\\" if outside.endswith(b"\\") else b"")
        self.num_parts += num_texts + outside.count(b"[") + outside.count(b"{")
        self.num_items += outside.count(b",")

    def _end_text(self, end: bytes) -> None:
        self._is_in_text = end != b'"'
        self._escape = end if self._is_in_text else b""
