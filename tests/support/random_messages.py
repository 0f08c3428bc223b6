"""random_message: protobuf messages with a random subset of their fields, each with a random or an extreme value."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 4

_INTEGERS = (-(2**31), -1, 0, 1, 2, 3, 16, 127, 2**31 - 1)
_LONGS = (*_INTEGERS, -(2**63), 2**63 - 1)
_REALS = (-math.inf, -1e30, -1.0, 0.0, 1e-30, 0.5, 1.0, 2.0, 1e30, math.inf, math.nan)
_TEXTS = (
    "",
    "a",
    "tiny",
    "user",
    "assistant",
    "json",
    "\x00",
    "é\U0001f600",
    "<|im_end|>",
    "{{ x }}",
    "x" * 300,
    "../..",
)


def random_message(message: Message, rng: random.Random, depth: int = 0) -> Message:
    """Fill the message, and return it."""
    fields = [field for field in message.DESCRIPTOR.fields if rng.random() < 2 / (2 + depth)]
    for field in rng.sample(fields, rng.randint(0, len(fields))):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(message, field, rng)
        elif field.is_repeated:
            _fill_list(message, field, rng, depth)
        elif field.message_type is not None:
            if depth < MAX_DEPTH:
                random_message(getattr(message, field.name), rng, depth + 1)
        else:
            setattr(message, field.name, _value(field, rng))
    return message


def _fill_list(message: Message, field: Any, rng: random.Random, depth: int) -> None:
    entries = getattr(message, field.name)
    for _ in range(rng.choice((0, 1, 2, 5, 40))):
        if field.message_type is None:
            entries.append(_value(field, rng))
        elif depth < MAX_DEPTH:
            random_message(entries.add(), rng, depth + 1)


def _fill_map(message: Message, field: Any, rng: random.Random) -> None:
    key, value = field.message_type.fields
    for _ in range(rng.choice((0, 1, 3))):
        if value.message_type is None:
            getattr(message, field.name)[_value(key, rng)] = _value(value, rng)
        else:
            random_message(getattr(message, field.name)[_value(key, rng)], rng, MAX_DEPTH)


def _value(field: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(_TEXTS).encode() if field.type == FieldDescriptor.TYPE_BYTES else rng.choice(_TEXTS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 99))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_REALS)
    if kind == FieldDescriptor.CPPTYPE_INT32:
        return rng.choice(_INTEGERS)
    if kind == FieldDescriptor.CPPTYPE_INT64:
        return rng.choice(_LONGS)
    return abs(rng.choice(_INTEGERS))  # unsigned
