"""FrameCodec and its array values: what is packed comes back, and other frames are refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from quire.proto.codec import FrameCodec, pack_floats, pack_ints, unpack_floats, unpack_ints
from quire.proto.errors import InvalidRequest, ProtocolError

CODEC = FrameCodec("test", 7)


def test_frame_is_a_version_byte_and_a_msgpack_array() -> None:
    frame = CODEC.encode(("tag", 1, b"bytes"))
    assert frame == b"\x07" + msgpack.packb(["tag", 1, b"bytes"])
    assert CODEC.decode(frame, list) == ["tag", 1, b"bytes"]


@pytest.mark.parametrize(("frame", "version"), [(b"", "none"), (b"\x06\x90", "6")])
def test_other_version_is_refused_with_both_versions(frame: bytes, version: str) -> None:
    with pytest.raises(ProtocolError, match=rf"test message has version {version}, must be 7"):
        CODEC.decode(frame, list)


@pytest.mark.parametrize("error", [ValueError, TypeError, IndexError, KeyError])
def test_value_that_cannot_be_built_is_a_protocol_error(error: type[Exception]) -> None:
    def build(values: object) -> None:
        raise error("bad value")

    with pytest.raises(ProtocolError, match=r"test message cannot be read: .*bad value"):
        CODEC.decode(CODEC.encode(()), build)


def test_invalid_request_of_a_message_is_a_protocol_error() -> None:
    def build(values: object) -> None:
        raise InvalidRequest("sampling.n", "is 0, must be at least 1")

    with pytest.raises(ProtocolError, match=r"test message cannot be read: sampling\.n"):
        CODEC.decode(CODEC.encode(()), build)


def test_integers_travel_as_little_endian_int32_whatever_their_layout() -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    packed = pack_ints(values)
    assert packed[:8] == b"\x00\x00\x00\x00\x02\x00\x00\x00"
    assert unpack_ints(packed).tolist() == values.ravel().tolist()
    assert unpack_ints(b"").size == 0


def test_floats_travel_as_little_endian_float32() -> None:
    values = np.array([[1.5, -np.inf], [0.0, 2.0**-20]], dtype=np.float32)
    unpacked = unpack_floats(pack_floats(values))
    assert unpacked.dtype == np.float32
    assert unpacked.tolist() == values.ravel().tolist()
