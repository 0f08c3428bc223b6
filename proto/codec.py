"""FrameCodec: the frames of dataclasses between processes. A frame is a version byte and a msgpack array.

The array is a tag that names the class, and then the values of its fields in the order of their declaration. A
dataclass within it is the array of its own fields, an enum its value, and an array of integers or floats its
little-endian bytes. Nothing else describes a message: `FrameCodec` reads the fields and their type hints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt

from .block_tables import IntArray
from .errors import InvalidRequest, ProtocolError
from .later_fields import SENT_IF_SET

FloatArray = npt.NDArray[np.float32]
# [n, 2]
PairArray = Annotated[IntArray, "pairs"]
Message = TypeVar("Message")
Built = TypeVar("Built")
NO_INTS: IntArray = np.zeros(0, dtype=np.int32)
NO_INTS.flags.writeable = False
NO_PAIRS: IntArray = NO_INTS.reshape(0, 2)

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")


class FrameCodec(Generic[Message]):
    """The frames of one protocol's messages.

    Args:
        protocol: its name in errors, for example ``step``.
        version: a frame of another version is refused.
        kinds: tag |-> dataclass of the message. A class with an attribute SENT_ORDER, names of all its fields, is
            sent in that order. A class has its own form if it has the methods `pack` and `unpack`.
        exact: messages that are refused if they, or a part of them, have fields of a later release, which are
            ignored in all others.
    """

    def __init__(
        self, protocol: str, version: int, kinds: Mapping[str, type[Message]], exact: tuple[type, ...] = ()
    ) -> None:
        self.protocol, self.version = protocol, version
        known: Mapping[str, Any] = kinds
        self._tags = {kind: (tag, _packer(kind)) for tag, kind in known.items()}
        self._kinds = {tag: (kind, kind in exact) for tag, kind in known.items()}
        self._prefix = bytes((version,))

    def encode(self, message: Message) -> bytes:
        tag, pack = self._tags[type(message)]
        packed: bytes = msgpack.packb((tag, *pack(message)), default=_plain)
        return self._prefix + packed

    def decode(self, frame: bytes) -> Message:
        """Return the message of a frame.

        Raises:
            ProtocolError: the frame has another version or tag, or is not msgpack, or a value is not allowed.
        """
        return self.read(frame, self._build)

    def read(self, frame: bytes, build: Callable[[list[Any]], Built]) -> Built:
        """Return the object that `build` makes of the tag and the values of a frame. Raises ProtocolError."""
        if not frame or frame[0] != self.version:
            version = frame[0] if frame else "none"
            raise ProtocolError(
                f"{self.protocol} message has version {version}, must be {self.version}: "
                "both processes need the same release of quire"
            )
        try:
            return build(msgpack.unpackb(frame[1:]))  # with a memoryview 0.2 us more than copying 500 bytes
        except (ValueError, TypeError, IndexError, KeyError, InvalidRequest) as error:
            raise ProtocolError(f"{self.protocol} message cannot be read: {error}") from error

    def _build(self, values: list[Any]) -> Message:
        tag, *rest = values
        kind, is_exact = self._kinds[tag]
        built: Message = _build(kind, rest, is_exact)
        return built


def unpack_ints(raw: bytes) -> IntArray:
    """Return a read-only [n] int32 view of little-endian bytes."""
    if not raw:  # as most arrays of a message: 0.05 us, not 0.37 us
        return NO_INTS
    return np.frombuffer(raw, _INT)


def unpack_floats(raw: bytes) -> FloatArray:
    """Return a read-only [n] float32 view of little-endian bytes."""
    return np.frombuffer(raw, _FLOAT)


def num_always_sent(kind: Any) -> int:
    """Return the number of a dataclass's leading fields that every sender of this version sends."""
    always = [index for index, each in enumerate(_members(kind), 1) if SENT_IF_SET not in each.metadata]
    return always[-1] if always else 0


def _plain(value: Any) -> Any:
    """Return the msgpack value of an array or a dataclass."""
    kind: Any = type(value)
    if kind is not np.ndarray:
        return _packer(kind)(value)
    if not value.size:
        return b""
    if value.dtype is _INT or value.dtype is _FLOAT:
        return value.tobytes()
    return np.ascontiguousarray(value, _FLOAT if value.dtype.kind == "f" else _INT).tobytes()


def _members(kind: Any) -> Sequence[Field[Any]]:
    """Return the fields of a dataclass in the order in which they are sent."""
    declared = {each.name: each for each in fields(kind)}
    order = getattr(kind, "SENT_ORDER", tuple(declared))
    assert sorted(order) == sorted(declared), f"{kind.__name__}.SENT_ORDER and the fields differ"
    return [declared[name] for name in order]


@cache
def _packer(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that lists the fields of a dataclass which are sent."""
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} cannot be sent")
    if hasattr(kind, "pack"):
        pack: Callable[[Any], tuple[Any, ...]] = kind.pack
        return pack
    members, num_always = _members(kind), num_always_sent(kind)
    values_of = _attributes(tuple(each.name for each in members))
    if num_always == len(members):
        return values_of
    unset = [
        each.default_factory() if each.default is MISSING else each.default
        for each in reversed(members[num_always:])
    ]
    return partial(_values_until_unset, values_of, unset)


def _attributes(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:  # then it returns a tuple, in a third of the time of a loop
        return attrgetter(*names)
    return (lambda message: (getattr(message, names[0]),)) if names else lambda message: ()


def _values_until_unset(
    values_of: Callable[[Any], tuple[Any, ...]], unset: list[Any], message: Any
) -> tuple[Any, ...]:
    values = values_of(message)
    num_sent = len(values)
    for value, default in zip(reversed(values), unset, strict=False):
        if value is not default and (value.size if isinstance(value, np.ndarray) else value != default):
            break
        num_sent -= 1
    return values[:num_sent]


def _build(kind: Any, values: list[Any], is_exact: bool) -> Any:
    """Return the dataclass of its fields' values, of which the last may be absent."""
    if type(values) is not list:
        raise TypeError(f"{kind.__name__} is of type {type(values).__name__}, must be a list")
    if hasattr(kind, "unpack"):
        return kind.unpack(values)
    num_known = len(kind.__dataclass_fields__)  # `fields` takes 1 us
    return _constructor(kind, min(len(values), num_known + 1), is_exact)(*values)


@cache
def _constructor(kind: type, num_values: int, is_exact: bool) -> Callable[..., Any]:
    """Return the function that makes a dataclass of so many of its fields' values.

    It is compiled from source, as a dataclass's own methods are: a TokenBatch takes 1.0 us, with a loop over
    converters 2.2 us.
    """
    members, hints = _members(kind), get_type_hints(kind, include_extras=True)
    if is_exact and num_values > len(members):
        raise ValueError(f"{kind.__name__} has fields of a later release")
    source = _ConverterSource(is_exact)
    by_name = any(each.kw_only for each in members)
    arguments = [
        f"{each.name + '=' if by_name else ''}{source.of(hints[each.name], each.name)}"
        for each in members[:num_values]
    ]
    names = [each.name for each in members[:num_values]]
    code = f"lambda {', '.join((*names, '*_later'))}: {source.name_of(kind)}({', '.join(arguments)})"
    made: Callable[..., Any] = eval(code, source.scope)
    return made


class _ConverterSource:
    """Source of the conversions from msgpack values to the types of fields.

    Attributes:
        scope: the names that the source uses.
    """

    def __init__(self, is_exact: bool) -> None:
        self._is_exact = is_exact
        self.scope: dict[str, Any] = {"_build": _build}

    def name_of(self, value: Any) -> str:
        """Return the name of a class or function in the scope."""
        name = f"_{value.__name__}"
        assert self.scope.setdefault(name, value) is value, f"two objects are named {name}"
        return name

    def of(self, hint: Any, value: str) -> str:
        """Return the expression that converts the variable `value`."""
        if hint in _ARRAYS:
            return f"{self.name_of(_ARRAYS[hint])}({value})"
        kind, parts = get_origin(hint), [part for part in get_args(hint) if part not in (NoneType, Ellipsis)]
        if kind in (Union, UnionType):
            # A class that has a field of several types tells them apart itself.
            converted = self.of(parts[0], value) if len(parts) == 1 else value
            return value if converted == value else f"None if {value} is None else {converted}"
        if kind is tuple:
            converted = self.of(parts[0], "entry") if len(parts) == 1 else "entry"
            entries = value if converted == "entry" else f"[{converted} for entry in {value}]"
            return f"tuple({entries}) if {value} else ()"
        if is_dataclass(hint):
            return f"_build({self.name_of(hint)}, {value}, {self._is_exact})"
        is_enum = isinstance(hint, type) and issubclass(hint, Enum)
        return f"{self.name_of(hint)}({value})" if is_enum else value


def _unpack_pairs(raw: bytes) -> IntArray:
    return unpack_ints(raw).reshape(-1, 2)


_ARRAYS: dict[Any, Callable[[bytes], Any]] = {
    IntArray: unpack_ints,
    FloatArray: unpack_floats,
    PairArray: _unpack_pairs,
}
