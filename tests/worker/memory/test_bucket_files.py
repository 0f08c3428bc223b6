"""KvDirectory in a bucket: what is read is what was written, bounded, and a store that fails costs a miss."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from kv_blocks import random_blocks, read_genuine

from quire.proto.errors import ConfigError
from quire.worker.memory import bucket_files, kv_directory
from quire.worker.memory.block_files import NoRoom
from quire.worker.memory.kv_directory import KvDirectory

boto3 = pytest.importorskip("boto3")
server = pytest.importorskip("moto.server")

BLOCK_BYTES = 64 << 10
LAYOUT, KEY = b"l" * 16, b"k" * 32
make_blocks, genuine = partial(random_blocks, BLOCK_BYTES), partial(read_genuine, BLOCK_BYTES)
MIB = 1 << 20


@contextmanager
def object_store() -> Iterator[str]:
    """Run an object store; yields its URL. All of this process have the same buckets."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        running.stop()


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture
def client(store: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make an empty bucket, and let it be found as users do."""
    for name, value in (
        ("AWS_ENDPOINT_URL_S3", store),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    own = boto3.client("s3")
    own.create_bucket(Bucket="kv-blocks")
    yield own
    for each in own.list_objects_v2(Bucket="kv-blocks").get("Contents", ()):
        own.delete_object(Bucket="kv-blocks", Key=each["Key"])
    own.delete_bucket(Bucket="kv-blocks")


def open_bucket(max_bytes: int = 64 * MIB, place: str = "s3://kv-blocks/of/llama") -> KvDirectory:
    directory = KvDirectory.open(place, max_bytes, LAYOUT, [BLOCK_BYTES], KEY)
    directory.scan()
    return directory


def objects(client: Any) -> list[Any]:
    found = client.list_objects_v2(Bucket="kv-blocks").get("Contents", ())
    return [each for each in found if each["Key"].endswith(".kv")]


def test_blocks_are_found_by_another_server(client: Any) -> None:
    blocks = make_blocks(40)
    open_bucket().write(list(blocks.items()))
    keys = list(blocks)
    assert genuine(open_bucket(), [keys[30], keys[3], keys[4]]) == {
        key: blocks[key] for key in (keys[3], keys[4], keys[30])
    }
    assert {each["Key"].rsplit("/", 1)[0] for each in objects(client)} == {
        f"of/llama/quire-kv/{LAYOUT.hex()}"
    }


def test_small_objects_are_joined(client: Any) -> None:
    directory, blocks = open_bucket(), make_blocks(6)
    for pair in blocks.items():
        directory.write([pair])
    assert len(objects(client)) == 1
    assert genuine(open_bucket(), list(blocks)) == blocks


def test_objects_stay_within_the_bound(client: Any) -> None:
    directory, count = open_bucket(6 * MIB), 2 * MIB // BLOCK_BYTES
    for seed in range(5):
        blocks = make_blocks(count, seed)
        changes = directory.write(list(blocks.items()))
        assert changes.added == list(blocks)
        found = client.list_objects_v2(Bucket="kv-blocks")["Contents"]
        assert sum(each["Size"] for each in found) == directory.num_bytes <= 6 * MIB
    assert len(changes.removed) == count
    with pytest.raises(NoRoom, match="do not fit"):
        open_bucket(MIB).write(list(blocks.items()))


def test_changed_or_deleted_objects_are_misses(client: Any) -> None:
    blocks = [make_blocks(2 * MIB // BLOCK_BYTES, seed) for seed in range(2)]
    writer = open_bucket()
    writer.write(list(blocks[0].items()))
    (first,) = objects(client)
    writer.write(list(blocks[1].items()))
    (second,) = (each for each in objects(client) if each["Key"] != first["Key"])
    reader = open_bucket()
    content = bytearray(client.get_object(Bucket="kv-blocks", Key=first["Key"])["Body"].read())
    content[-1] ^= 1
    client.put_object(Bucket="kv-blocks", Key=first["Key"], Body=bytes(content))
    client.delete_object(Bucket="kv-blocks", Key=second["Key"])
    assert set(genuine(reader, [*blocks[0], *blocks[1]])) == set(list(blocks[0])[:-1])
    assert set(reader.keys()) == set(blocks[0])
    assert not reader.scan().added


def test_store_that_is_gone_costs_misses(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server of the same buckets, which ends."""
    blocks = make_blocks(3)
    with object_store() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        directory = open_bucket()
        directory.write(list(blocks.items()))
        assert genuine(directory, list(blocks))
    with pytest.raises(ConfigError, match=r"KV cannot be kept in s3://kv-blocks/of/llama: .*127\.0\.0\.1"):
        open_bucket()
    assert not genuine(directory, list(blocks))
    with pytest.raises(OSError, match="s3://kv-blocks"):
        directory.write(list(make_blocks(1, 1).items()))
    with pytest.raises(OSError, match="s3://kv-blocks"):
        directory.scan()


def test_store_that_hangs_is_given_up(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_files, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(bucket_files, "MAX_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"(?i)timeout"):
            open_bucket()


def test_bucket_of_another_version_or_without_rights_is_refused(client: Any) -> None:
    client.put_object(Bucket="kv-blocks", Key="old/quire-kv/version", Body=b"9\n")
    with pytest.raises(ConfigError, match="version '9', must be 2"):
        open_bucket(place="s3://kv-blocks/old")
    with pytest.raises(ConfigError, match=r"s3://not-there: .*NoSuchBucket"):
        open_bucket(place="s3://not-there")


def test_all_of_a_prefix_is_read(client: Any) -> None:
    """More blocks than one object, one read and the head of an object have."""
    count = kv_directory.MAX_FILE_BYTES // BLOCK_BYTES
    directory = open_bucket()
    blocks = [make_blocks(count, seed) for seed in range(2)]
    for each in blocks:
        directory.write(list(each.items()))
    assert genuine(open_bucket(), [*blocks[1], *blocks[0]]) == blocks[0] | blocks[1]
