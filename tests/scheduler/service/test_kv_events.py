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
    with context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVBUF, 4096)
        client.connect(publisher.replay_endpoint)
        client.send_multipart((b"", first))
        found = list[tuple[bytes, Any]]()
        while True:
            _, number, payload = client.recv_multipart()
            if number == END_OF_REPLAY:
                return found
            found.append((number, msgspec.msgpack.decode(payload)))


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


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
    assert msgspec.msgpack.decode(payload) == {
        "ts": 2.5,
        "events": [
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
        "data_parallel_rank": 0,
    }


def test_replay_begins_at_the_number_that_is_asked_for(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    for timestamp in range(3):
        publisher.publish([REMOVED], float(timestamp))
    whole = replay(context, publisher, number(0))
    assert [each for each, _ in whole] == [number(value) for value in range(4)]
    assert whole[0][1] == {"ts": 1.5, "events": [{"type": "AllBlocksCleared"}]}
    assert [batch["ts"] for _, batch in replay(context, publisher, number(2))] == [1.0, 2.0]
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
    assert [(batch["data_parallel_rank"], len(batch["events"])) for batch in batches] == [(0, 2), (1, 1)]


def test_root_is_an_extra_key_of_each_block(publisher: KvEventPublisher, context: zmq.Context[Any]) -> None:
    own = BlocksStored([bytes(32)] * 2, DEVICE_MEDIUM, 0, bytes(32), bytes(32), "poet", b"\x01\x02")
    publisher.publish([own], 3.0)
    ((_, batch),) = replay(context, publisher, number(1))
    (event,) = batch["events"]
    assert (event["extra_keys"], event["lora_name"]) == ([["0102"]] * 2, "poet")


def test_images_are_extra_keys_of_the_blocks_that_they_touch(
    publisher: KvEventPublisher, context: zmq.Context[Any]
) -> None:
    media = [(), (b"\x0a", b"\x0b")]
    for root in (None, b"\x01"):
        publisher.publish([BlocksStored([bytes(32)] * 2, DEVICE_MEDIUM, 0, root=root, media=media)], 3.0)
    events = [batch["events"][0] for _, batch in replay(context, publisher, number(1))]
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
