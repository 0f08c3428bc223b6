"""FrameCodec: any dataclass comes back as it was sent, and other frames are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
import pytest

from quire.proto.block_tables import IntArray
from quire.proto.codec import NO_INTS, NO_PAIRS, FloatArray, FrameCodec, PairArray
from quire.proto.errors import InvalidRequest, ProtocolError
from quire.proto.later_fields import sent_if_set


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    sizes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    number: int
    later_by_name: int = field(default=3, kw_only=True)
    part: Part
    parts: tuple[Part, ...]
    color: Color | None
    colors: tuple[Color, ...] = ()
    optional: Part | None = None
    words: tuple[str | tuple[int, ...], ...] = ()
    free: Mapping[str, int] | int = 0


@dataclass(frozen=True, slots=True)
class Arrays:
    ints: IntArray
    floats: FloatArray = sent_if_set(np.zeros(0, np.float32))
    pairs: PairArray = sent_if_set(NO_PAIRS)
    last: bool = sent_if_set(True)


@dataclass(frozen=True, slots=True)
class Checked:
    number: int

    def __post_init__(self) -> None:
        if self.number == 0:
            raise InvalidRequest("number", "is 0, must be at least 1")
        if self.number < 0:
            raise (ValueError, TypeError, IndexError, KeyError)[-self.number - 1]("bad value")


@dataclass(frozen=True, slots=True)
class Holder:
    part: Part


CODEC = FrameCodec[Whole | Arrays | Checked | Holder](
    "test", 7, {"whole": Whole, "arrays": Arrays, "checked": Checked, "holder": Holder}, exact=(Holder,)
)


def frame_of(*values: object) -> bytes:
    packed: bytes = msgpack.packb(values)
    return b"\x07" + packed


def test_frame_is_a_version_byte_and_a_msgpack_array_of_the_fields_in_order() -> None:
    message = Whole(1, Part("a", ((2, 0.5),)), (), Color.RED)
    frame = CODEC.encode(message)
    assert frame == frame_of("whole", 1, 3, ["a", [[2, 0.5]]], [], "red", [], None, [], 0)
    assert CODEC.decode(frame) == message


@pytest.mark.parametrize(
    "message",
    [
        Whole(
            1, Part("a"), (Part("b", ((1, 1.5), (2, 0.0))),), Color.BLUE, (Color.RED,), Part("c"), later_by_name=5
        ),
        Whole(1, Part("a"), (), None, words=("text",), free={"a": 1}),
        Checked(5),
        Holder(Part("x")),
    ],
)  # fmt: skip
def test_message_comes_back_as_it_was_sent(message: Whole | Checked | Holder) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


@pytest.mark.parametrize(("frame", "version"), [(b"", "none"), (b"\x06\x90", "6")])
def test_other_version_is_refused_with_both_versions(frame: bytes, version: str) -> None:
    with pytest.raises(ProtocolError, match=rf"test message has version {version}, must be 7"):
        CODEC.decode(frame)


@pytest.mark.parametrize("number", [-1, -2, -3, -4])
def test_value_that_a_class_refuses_is_a_protocol_error(number: int) -> None:
    with pytest.raises(ProtocolError, match=r"test message cannot be read: .*bad value"):
        CODEC.decode(frame_of("checked", number))


def test_invalid_request_of_a_message_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match=r"test message cannot be read: number: is 0"):
        CODEC.decode(frame_of("checked", 0))


@pytest.mark.parametrize(
    "values",
    [
        (), ([], 1), ("other", 1), ("checked",), ("whole", 1, 3, 5, [], "red"), ("whole", 1, 3, "a", [], "red"),
        ("whole", 1, 3, ["a"], [], "green"),
    ],
)  # fmt: skip
def test_unknown_tag_or_value_or_missing_field_is_a_protocol_error(values: tuple[object, ...]) -> None:
    with pytest.raises(ProtocolError, match="test message cannot be read"):
        CODEC.decode(frame_of(*values))


def test_fields_of_a_later_release_are_ignored_unless_the_message_is_exact() -> None:
    assert CODEC.decode(frame_of("checked", 5, "later", 6)) == Checked(5)
    for values in (("holder", ["a"], "later"), ("holder", ["a", [], "later"])):
        with pytest.raises(ProtocolError, match="has fields of a later release"):
            CODEC.decode(frame_of(*values))


def test_fields_at_the_end_are_sent_if_one_of_them_is_set() -> None:
    one = np.ones(1, np.int32)
    assert CODEC.encode(Arrays(one)) == frame_of("arrays", b"\1\0\0\0")
    assert CODEC.encode(Arrays(one, pairs=np.zeros((0, 2), np.int32))) == CODEC.encode(Arrays(one))
    frame = CODEC.encode(Arrays(one, last=False))
    assert frame == frame_of("arrays", b"\1\0\0\0", b"", b"", False)
    assert CODEC.decode(frame).pairs.shape == (0, 2)  # type: ignore[union-attr]


def test_integers_travel_as_little_endian_int32_whatever_their_layout() -> None:
    strided: Any = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    for values in (strided, strided.astype(np.int64), strided.astype(">i4")):
        frame = CODEC.encode(Arrays(values, pairs=strided))
        assert b"\x00\x00\x00\x00\x02\x00\x00\x00" in frame
        received = CODEC.decode(frame)
        assert isinstance(received, Arrays)
        assert received.ints.dtype == np.int32
        assert received.ints.tolist() == values.ravel().tolist()
        assert received.pairs.tolist() == strided.tolist()


def test_floats_travel_as_little_endian_float32() -> None:
    values: Any = np.array([1.5, -np.inf, 0.0, 2.0**-20], dtype=np.float32)
    for sent in (values, values.astype(np.float64)):
        received = CODEC.decode(CODEC.encode(Arrays(NO_INTS, sent)))
        assert isinstance(received, Arrays)
        assert received.floats.dtype == np.float32
        assert received.floats.tolist() == values.tolist()
