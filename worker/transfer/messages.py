"""Messages between ranks of different replicas that read each other's blocks, and the bounds of both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.codec import NO_INTS, FrameCodec
from ...proto.kv_layout import KvLayout
from ...proto.kv_transfer import KvFailure
from ...proto.later_fields import sent_if_set
from ..memory.shared_segment import SegmentAddress
from .kv_blocks import BlockMap, Heads
from .nixl import NixlMemory

# Bytes of a read: small enough that reading, checking and writing overlap. A reader that copies from the server's
# memory does all by itself, and asks once for more bytes.
READ_BYTES = 4 << 20
MAPPED_READ_BYTES = 64 << 20
# Reads of a peer at once.
READS_AT_ONCE = 2
# Largest answer that is accepted; a single block may exceed READ_BYTES.
MAX_FRAME_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for a comparison of layouts; a Welcome answers.

    Attributes:
        buffer: memory that the reader shares, to find out whether the server can map it.
        wants_nixl: the reader reads by NIXL, if the server has it.
    """

    instance: str
    layout: KvLayout
    buffer: SegmentAddress | None = sent_if_set(None)
    wants_nixl: bool = sent_if_set(False)


@dataclass(frozen=True, slots=True)
class StreamOffer:
    """A port at the server's address, where a reader that sends the token gets blocks encrypted with the key."""

    port: int
    token: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's own layout, and how its blocks can be read.

    Attributes:
        problem: the fields that differ; empty if the ranks may exchange blocks.
        maps_buffer: the server writes into the memory that the reader shares.
        blocks: memory with the blocks, which a reader on the server's host maps; None on a GPU.
        stream: between hosts only.
        nixl: registered memory with the blocks, if the reader wants it and the server has some.
    """

    layout: KvLayout
    problem: str
    maps_buffer: bool = sent_if_set(False)
    blocks: BlockMap | None = sent_if_set(None)
    stream: StreamOffer | None = sent_if_set(None)
    nixl: NixlMemory | None = sent_if_set(None)


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for heads of blocks of a lease; a ReadDone answers.

    Attributes:
        heads: (first, count) of each layer of the group, one after the other.
        buffer: shared memory for the bytes, from its start; None if they are to follow the answer.
    """

    read_id: int
    instance: str
    generation: int
    group: int
    block_ids: IntArray
    heads: IntArray
    buffer: SegmentAddress | None


@dataclass(frozen=True, slots=True)
class Check:
    """Asks whether a lease is in effect and has all these blocks; a ReadDone answers.

    Attributes:
        waits: for the lease to come into effect, and until the steps before it have written its blocks.
        group, heads: as of a Read, what the reader has got over a network: the answer has the checksum of it.
    """

    read_id: int
    instance: str
    generation: int
    block_ids: IntArray
    waits: bool
    group: int = sent_if_set(0)
    heads: IntArray = sent_if_set(NO_INTS)


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The end of a read or a check.

    Attributes:
        failure: why there are no bytes; empty if there are.
        is_in_buffer: they are in the reader's shared memory.
    """

    read_id: int
    failure: str
    checksum: int
    is_in_buffer: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Tells that a lease is needed no more."""

    instance: str
    generation: int


WireMessage = Hello | Welcome | Read | Check | ReadDone | Release
wire = FrameCodec[WireMessage](
    "kv transfer",
    1,
    {
        "hello": Hello,
        "welcome": Welcome,
        "read": Read,
        "check": Check,
        "done": ReadDone,
        "release": Release,
    },
)


class KvReadError(Exception):
    """A failed exchange with a peer.

    Attributes:
        reason: of the failure.
    """

    def __init__(self, reason: KvFailure, problem: str) -> None:
        super().__init__(f"{reason}: {problem}")
        self.reason = reason


def pack_heads(heads: Heads) -> IntArray:
    return np.array(heads, np.int32).ravel()


def unpack_heads(packed: IntArray) -> Heads:
    pairs = packed.reshape(-1, 2).tolist()
    return tuple((first, count) for first, count in pairs)
