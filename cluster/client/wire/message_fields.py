"""Conversions between dataclasses and messages of quire.v1, whose fields of equal names correspond.

A value within a message is a dataclass, or a tuple with the message's fields in their order; an enum is its value's
name without the enum's prefix, in small letters, and None if it is unspecified; an optional field that is unset takes
the dataclass's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)
T = TypeVar("T")


def to_message(kind: type[MessageT], value: Any, **others: Any) -> MessageT:
    """Return the message of the fields that `value` has as attributes, and of `others`. None leaves a field unset.

    Raises:
        ValueError, TypeError: a field cannot hold its value.
    """
    return kind(**{**_present(kind.DESCRIPTOR, value, others.keys()), **others})


def from_message(kind: type[T], message: Message, **others: Any) -> T:
    """Return the dataclass of the message's fields and of `others`. Fields that it does not have are ignored."""
    known: Any = kind
    for name, has_default, convert in _readers(known, message.DESCRIPTOR):
        if name not in others and not (has_default and not message.HasField(name)):
            value = getattr(message, name)
            others[name] = value if convert is None else convert(value)
    return kind(**others)


def _present(kind: Any, value: Any, without: Any = ()) -> dict[str, Any]:
    """Return field |-> value of the message of a dataclass or a tuple."""
    if type(value) is tuple:
        return dict(zip(kind.fields_by_name, value, strict=True))
    present = {}
    for name, convert in _writers(kind):
        given = getattr(value, name, None)
        if given is not None and name not in without:
            present[name] = given if convert is None else convert(given)
    return present


@cache
def _writers(kind: Descriptor) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """Return the fields of a message, with the conversion of their values; None if they stay as they are."""
    return [(field.name, _writer(field)) for field in kind.fields]


def _writer(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    part, enum = field.message_type, field.enum_type
    if enum is not None:
        return lambda value: _prefix(enum) + value.upper()
    if part is None or _is_map(field):
        return None
    if field.is_repeated:
        return lambda values: [_present(part, each) for each in values]
    return partial(_present, part)


@cache
def _readers(kind: Any, message: Descriptor) -> list[tuple[str, bool, Callable[[Any], Any] | None]]:
    """Return the fields that both have: name, whether the dataclass's default stands for an unset one, conversion."""
    hints = get_type_hints(kind)
    return [
        (
            each.name,
            message.fields_by_name[each.name].has_presence
            and not each.default is each.default_factory is MISSING,
            _reader(hints[each.name], message.fields_by_name[each.name]),
        )
        for each in fields(kind)
        if each.name in message.fields_by_name
    ]


def _reader(hint: Any, field: FieldDescriptor) -> Callable[[Any], Any] | None:
    """Return the conversion of a field's values; None if they stay as they are."""
    if _is_map(field):
        return dict
    parts = [part for part in get_args(hint) if is_dataclass(part) or get_args(part)]
    convert = (
        _read_enum(field.enum_type) if field.message_type is None else _read_part(parts[0] if parts else hint)
    )
    if not field.is_repeated:
        return convert
    return tuple if convert is None else lambda values: tuple(map(convert, values))


def _read_part(kind: Any) -> Callable[[Any], Any]:
    is_tuple = not is_dataclass(kind)
    if is_tuple:
        return lambda message: tuple(getattr(message, field.name) for field in message.DESCRIPTOR.fields)
    return partial(from_message, kind)


def _read_enum(kind: EnumDescriptor | None) -> Callable[[int], str | None] | None:
    if kind is None:
        return None
    names = {
        each.number: each.name.removeprefix(_prefix(kind)).lower() for each in kind.values if each.number
    }
    return names.get


def _prefix(kind: EnumDescriptor) -> str:
    return kind.values_by_number[0].name.removesuffix("UNSPECIFIED")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
