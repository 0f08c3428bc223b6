"""Messages that subscribers of KV events receive, and replays."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from quire.proto.errors import ConfigError
from quire.proto.options.values import zmq_endpoint
from quire.scheduler.kv.cache_events import DEVICE_MEDIUM, HOST_MEDIUM, BlocksRemoved, BlocksStored
from quire.scheduler.service import kv_events
from quire.scheduler.service.kv_events import END_OF_REPLAY, KvEventPublisher

TIMEOUT_MS = 60_000
STORED = BlocksStored(
    [bytes(range(32)), bytes(range(1, 33))], DEVICE_MEDIUM, 0, None, np.arange(8, dtype=np.int32).tobytes()
)
REMOVED = BlocksRemoved([bytes(range(32))], HOST_MEDIUM, 0)


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher("zmq://127.0.0.1:*", "zmq://127.0.0.1:*", "kv@pod@model", 4, 1.5)
    yield publisher
    publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


def replay(context: zmq.Context[Any], publisher: KvEventPublisher, first: bytes) -> list[tuple[bytes, Any]]:
    """Return (number, batch) of each message from a number on."""
    found = replay_payloads(context, publisher, first)
    return [(own, msgspec.msgpack.decode(payload)) for own, payload in found]


def replay_payloads(
    context: zmq.Context[Any], publisher: KvEventPublisher, first: bytes
) -> list[tuple[bytes, bytes]]:
    with context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVBUF, 4096)
        client.connect(publisher.replay_endpoint)
        client.send_multipart((b"", first))
        found = list[tuple[bytes, bytes]]()
        while True:
            _, number, payload = client.recv_multipart()
            if number == END_OF_REPLAY:
                return found
            found.append((number, payload))


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Fields of vLLM's class of this name, as of its version 0.29."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Fields of vLLM's class of this name."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Stands for vLLM's class of this name."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Fields of vLLM's class of this name."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def vllm_classes() -> list[Any]:
    """Return the type of a batch, as typed here and, where vLLM is installed, its own."""
    try:
        from vllm.distributed.kv_events import KVEventBatch as own
    except ImportError:
        return [KVEventBatch]
    return [KVEventBatch, own]


# A batch of vLLM 0.26 with four tokens, without the optional fields.
OF_VLLM = bytes.fromhex(
    "93cb41daa8dbe0359fe79188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfdab89baa7b5857c0"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394ce0002505ccd0368cd0118cd0d0faa626c6f636b5f73"
    "697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
)


def test_subscriber_receives_the_bytes_of_vllm(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        subscriber.connect(publisher.endpoint)
        count = 1  # the publisher's own event has number 0
        while not subscriber.poll(10):  # until the subscription has reached the publisher
            publisher.publish([REMOVED], 2.0)
            count += 1
        publisher.publish([STORED, REMOVED], 2.5)
        received: list[bytes] = []
        while received[1:2] != [number(count)]:
            received = subscriber.recv_multipart()
    topic, _, payload = received
    assert topic == b"kv@pod@model"
    names = [0x0001020304050607, 0x0102030405060708]
    assert msgspec.msgpack.decode(payload) == [
        2.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": names,
                "parent_block_hash": None,
                "token_ids": list(range(8)),
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": names[:1], "medium": "CPU"},
        ],
        0,
    ]


@pytest.mark.parametrize("batch_type", vllm_classes())
def test_batches_are_decoded_by_the_classes_of_vllm(
    publisher: KvEventPublisher, context: zmq.Context[Any], batch_type: Any
) -> None:
    own = BlocksStored([bytes(range(32))], HOST_MEDIUM, 0, bytes(32), bytes(16), "poet", b"\x01\x02")
    publisher.publish([STORED, own, REMOVED], 2.5)
    cleared, batch = (
        msgspec.msgpack.decode(payload, type=batch_type)
        for _, payload in replay_payloads(context, publisher, number(0))
    )
    assert [type(event).__name__ for event in cleared.events] == ["AllBlocksCleared"]
    stored, adapted, removed = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 0)
    assert (stored.token_ids, stored.block_size, stored.medium) == (list(range(8)), 4, "GPU")
    assert (adapted.parent_block_hash, adapted.lora_name, adapted.extra_keys) == (0, "poet", [("0102",)])
    assert (removed.block_hashes, removed.medium) == ([0x0001020304050607], "CPU")


def test_batch_has_the_bytes_that_vllm_sent() -> None:
    batch = msgspec.msgpack.decode(OF_VLLM, type=KVEventBatch)
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    own = BlocksStored(
        [int(event.block_hashes[0]).to_bytes(8, "big")],
        DEVICE_MEDIUM,
        0,
        tokens=np.array(event.token_ids, np.int32).tobytes(),
    )
    sent = kv_events.KVEventBatch(batch.ts, [kv_events.message_of(own, event.block_size)], 0)
    assert msgspec.msgpack.encode(sent) == OF_VLLM


def test_replay_begins_at_the_number_that_is_asked_for(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    for timestamp in range(3):
        publisher.publish([REMOVED], float(timestamp))
    whole = replay(context, publisher, number(0))
    assert [each for each, _ in whole] == [number(value) for value in range(4)]
    assert whole[0][1] == [1.5, [{"type": "AllBlocksCleared"}], None]
    assert [batch[0] for _, batch in replay(context, publisher, number(2))] == [1.0, 2.0]
    assert replay(context, publisher, number(9)) == []


def test_slow_subscriber_gets_the_whole_replay(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    count, stored = 4000, BlocksStored([bytes(32)] * 200, DEVICE_MEDIUM, 0)
    for _ in range(count):
        publisher.publish([stored], 2.0)
    assert len(replay(context, publisher, number(0))) == 1 + count


def test_events_of_partitions_are_batches_of_their_ranks(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    other = BlocksRemoved([bytes(range(32))], DEVICE_MEDIUM, 1)
    publisher.publish([REMOVED, other, REMOVED], 3.0)
    batches = [batch for _, batch in replay(context, publisher, number(1))]
    assert [(rank, len(events)) for _, events, rank in batches] == [(0, 2), (1, 1)]


def test_root_is_an_extra_key_of_each_block(publisher: KvEventPublisher, context: zmq.Context[Any]) -> None:
    own = BlocksStored([bytes(32)] * 2, DEVICE_MEDIUM, 0, bytes(32), bytes(32), "poet", b"\x01\x02")
    publisher.publish([own], 3.0)
    ((_, batch),) = replay(context, publisher, number(1))
    (event,) = batch[1]
    assert (event["extra_keys"], event["lora_name"]) == ([["0102"]] * 2, "poet")


def test_images_are_extra_keys_of_the_blocks_that_they_touch(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    media = [(), (b"\x0a", b"\x0b")]
    for root in (None, b"\x01"):
        publisher.publish([BlocksStored([bytes(32)] * 2, DEVICE_MEDIUM, 0, root=root, media=media)], 3.0)
    events = [batch[1][0] for _, batch in replay(context, publisher, number(1))]
    assert [each["extra_keys"] for each in events] == [[None, ["0a", "0b"]], [["01"], ["01", "0a", "0b"]]]


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"1"], [b"", b"x" * 8, b""]])
def test_invalid_request_for_a_replay_is_ignored(
    publisher: KvEventPublisher, context: zmq.Context[Any], request_frames: list[bytes]
) -> None:
    with context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(publisher.replay_endpoint)
        client.send_multipart(request_frames)
        assert replay(context, publisher, number(9)) == []


def test_address_in_use_is_named(publisher: KvEventPublisher) -> None:
    taken = publisher.endpoint.replace("tcp://", "zmq://")
    with pytest.raises(ConfigError, match=f"kv_events is {taken}, which cannot be bound"):
        KvEventPublisher(taken, None, "", 4, 0.0)
    with pytest.raises(ConfigError, match="kv_events_replay is"):
        KvEventPublisher("zmq://127.0.0.1:*", taken, "", 4, 0.0)


@pytest.mark.parametrize(
    "value", ["tcp://127.0.0.1:1", "zmq://127.0.0.1", "zmq://:1", "zmq://a b:1", "zmq://h:65536"]
)
def test_address_of_another_form_is_refused(value: str) -> None:
    assert zmq_endpoint("kv_events", value) == (
        f"kv_events is {value!r}, must be zmq://HOST:PORT; with * as the port, the system chooses it"
    )
    for valid in "zmq://127.0.0.1:5557", "zmq://*:*", "zmq://[::1]:5557", "zmq://pod-0.svc:5557":
        assert zmq_endpoint("kv_events", valid) is None
