"""KvEventPublisher: sends what the prefix caches take in and evict to routers outside of quire, as vLLM sends it.

Messages have three frames: a topic, a sequence number of 8 bytes (big-endian, from 0) and a batch in msgpack. A
subscriber that missed some asks the replay socket with the first number that it lacks, and gets (number, batch) for
each that is still known, then the number -1 with an empty batch. llm-d's and Dynamo's routers read these messages.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from ...proto.config import CacheConfig
from ...proto.errors import ConfigError
from ...proto.transport.wakeup import Wakeup
from ..kv.cache_events import BlocksStored, CacheEvent
from .event_sink import EventSink, NoSink

# Batches that a subscriber may ask for again, and batches that wait for the thread. A step makes at most one batch.
MAX_KEPT_BATCHES = 10_000
# Messages that a slow subscriber may have waiting; later ones are lost to it, and it asks for them again.
MAX_UNREAD_MESSAGES = 100_000
MAX_REQUEST_BYTES = 1024
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger(__name__)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Message of blocks that a memory holds from now on. Fields and names are those of vLLM's event.

    Attributes:
        block_hashes: names of the blocks, in order.
        parent_block_hash: name of the block before the first; None at the start of a sequence.
        lora_id: vLLM's older number of an adapter, always None.
        medium: ``GPU`` (the device, also if it is a CPU) or ``CPU`` (host memory).
        extra_keys: for each block, what distinguishes it from other blocks with the same tokens: the tenant, salt and
            adapter as one text, then a text for each image that it touches. None for a block, or for all, without.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Message of blocks that a memory holds no longer."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Message that no memory holds a block: the replica has just started."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of one partition of the pool, in order. `ts` is in seconds since 1970.

    vLLM sends the batch as an array and, since its version 0.24, each event as a map with the name of its type. Its
    own decoder refuses a batch that is a map.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KvEventPublisher:
    """EventSink on a PUB socket and, for replays, a ROUTER socket, which a thread of its own serves.

    Traffic is not encrypted, and has the tokens of prompts: bind it where only routers can connect.

    Args:
        endpoint, replay_endpoint: ``zmq://HOST:PORT``; with ``*`` as the port, the system chooses it.
        block_size: tokens per block.
        started_at: in seconds since 1970.

    Attributes:
        endpoint, replay_endpoint: as they are bound, as ZeroMQ names them; empty without a replay socket.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, block_size: int, started_at: float
    ) -> None:
        self._topic, self._block_size = topic.encode(), block_size
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        # A whole replay fits, so that a subscriber that reads slowly loses neither a batch nor the end.
        self._replay.setsockopt(zmq.SNDHWM, 2 * MAX_KEPT_BATCHES)
        self.replay_endpoint = ""
        try:
            self.endpoint = _bind(self._publisher, "kv_events", endpoint)
            if replay_endpoint is not None:
                self.replay_endpoint = _bind(self._replay, "kv_events_replay", replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._waiting = deque[tuple[bytes, bytes]](maxlen=MAX_KEPT_BATCHES)
        self._kept = deque[tuple[bytes, bytes]](maxlen=MAX_KEPT_BATCHES)
        self._wakeup = Wakeup(self._context)
        self._is_woken = False
        self._is_closing = threading.Event()
        # Subscribers may know blocks of an earlier process.
        self._add(KVEventBatch(started_at, [AllBlocksCleared()]))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        _log.info("KV events at %s, replays at %s", self.endpoint, self.replay_endpoint or "no address")

    def publish(self, events: Sequence[CacheEvent], timestamp: float) -> None:
        if not events:
            return
        for partition in sorted({event.partition for event in events}):
            own = (event for event in events if event.partition == partition)
            self._add(
                KVEventBatch(timestamp, [message_of(each, self._block_size) for each in own], partition)
            )
        # One wake until the thread runs: each opens a socket, and ZeroMQ closes sockets later.
        if not self._is_woken:
            self._is_woken = True
            self._wakeup.wake()

    def close(self) -> None:
        """Send what waits, and end the thread. Safe to call twice."""
        self._is_closing.set()
        self._wakeup.wake()
        self._thread.join()
        self._wakeup.close()
        self._context.destroy(linger=1000)

    def _add(self, batch: KVEventBatch) -> None:
        # A number whose batch was pushed out of a full queue is missing, so that subscribers notice.
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting.append((number.to_bytes(8, "big"), self._encoder.encode(batch)))

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.socket, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._is_closing.is_set():
            self._send_waiting()
            ready = dict(poller.poll())
            if self._wakeup.socket in ready:
                self._wakeup.clear()
                self._is_woken = False  # before the queue is emptied, so that no batch waits for another wake
            if self._replay in ready:
                self._send_waiting()
                self._answer_replay()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            number, batch = self._waiting.popleft()
            self._kept.append((number, batch))
            self._publisher.send_multipart((self._topic, number, batch))  # never waits: PUB drops

    def _answer_replay(self) -> None:
        """Send the batches from a number on. What does not fit into the subscriber's queue is dropped."""
        request = self._replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            _log.warning("ignored a request for a replay of KV events that has no number of 8 bytes")
            return
        subscriber, delimiter, first = request
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart((subscriber, delimiter, number, batch), zmq.NOBLOCK)
        self._replay.send_multipart((subscriber, delimiter, END_OF_REPLAY, b""), zmq.NOBLOCK)


def open_sink(cache: CacheConfig, started_at: float) -> EventSink:
    """Return the publisher of a replica, or a sink of nothing if its options name no endpoint.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """
    if cache.kv_events is None:
        return NoSink()
    return KvEventPublisher(
        cache.kv_events, cache.kv_events_replay, cache.kv_events_topic, cache.block_size, started_at
    )


def message_of(event: CacheEvent, block_size: int) -> BlockStored | BlockRemoved:
    """Return the message of an event. A block's name is the first 8 bytes of its digest."""
    names = [_name(digest) for digest in event.digests]
    if not isinstance(event, BlocksStored):
        return BlockRemoved(names, event.medium)
    return BlockStored(
        names,
        None if event.parent is None else _name(event.parent),
        np.frombuffer(event.tokens, np.int32).tolist(),
        block_size,
        None,
        event.medium,
        event.lora_name,
        _extra_keys(event),
    )


def _extra_keys(event: BlocksStored) -> list[tuple[str, ...] | None] | None:
    root = () if event.root is None else (event.root.hex(),)
    media = event.media or [()] * len(event.digests)
    found = [(*root, *(digest.hex() for digest in own)) or None for own in media]
    return found if any(found) else None


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _bind(socket: zmq.Socket[Any], option: str, endpoint: str) -> str:
    try:
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.bind(endpoint.replace("zmq://", "tcp://", 1))
    except zmq.ZMQError as error:
        raise ConfigError(f"{option} is {endpoint}, which cannot be bound: {error}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
