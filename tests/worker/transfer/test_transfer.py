"""Blocks that ranks of different replicas read from each other, over real sockets and shared memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_replicas import (
    CPU,
    GRANT,
    SEGMENT_BYTES,
    SOURCES,
    TARGETS,
    Replica,
    assert_arrived,
    await_pull,
    await_report,
    make_config,
    move_state,
    pull_of,
    replica_with_heads,
    states_of,
    travel,
)

from quire.proto.block_tables import IntArray
from quire.proto.errors import ProtocolError
from quire.proto.kv_layout import layout_of
from quire.proto.kv_transfer import KvOrders, KvReport, KvReportKind
from quire.proto.transport.network import CurveKeys
from quire.worker.memory.checksum import checksum
from quire.worker.transfer import peers, transport
from quire.worker.transfer.kv_blocks import KvBlocks, MappedBlocks, heads_to_read
from quire.worker.transfer.peers import Peer
from quire.worker.transfer.planes import Planes
from quire.worker.transfer.sealed_stream import SealedStream
from quire.worker.transfer.service import KvService

SILENCE_S = "quire.worker.transfer.service.SILENCE_S"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no peer count as silent because its thread had to wait for a processor."""
    monkeypatch.setattr(SILENCE_S, 60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def no_mapping(blocks: object) -> None:
    raise OSError("the lender is on another host")


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks come by one way: memory of the lender, buffer of the reader, stream, or frames."""
    if way != "memory":  # as from a GPU, or from another host
        monkeypatch.setattr(peers, "MappedBlocks", no_mapping)
    if way in ("stream", "frames"):
        monkeypatch.setattr(peers._Buffer, "address", lambda self, num_bytes: None)
    if way == "frames":
        monkeypatch.setattr(peers, "_connect_stream", lambda endpoint, offer: None)


@pytest.mark.parametrize(("lenders", "readers"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (1, 8), (8, 4)])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("way", ["memory", "buffer"])
def test_ranks_of_any_sizes_exchange_heads(
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lenders: int,
    readers: int,
    dtype: str,
    way: str,
) -> None:
    use(way, monkeypatch)
    if 8 in (lenders, readers) and dtype != "auto":
        pytest.skip("one type proves it")
    source = Replica(make_config(lenders, dtype=dtype))
    target = Replica(make_config(readers, dtype=dtype), is_empty=True)
    if lenders == 8:  # pairs of ranks have the same head
        for rank, cache in enumerate(source.caches):
            for layer in cache.layers:
                layer.blocks.copy_(source.caches[rank // 2 * 2].layers[0].blocks)
    reports = travel(stack, source, target, tmp_path)
    assert [(report.name, report.failed.size) for report in reports] == [("", 0)] * readers
    if 8 not in (lenders, readers):
        assert_arrived(source, target)
        assert sum(report.num_bytes for report in reports) == 4 * sum(
            layout_of(make_config(1, dtype=dtype), 0, "w").block_bytes
        )
    elif readers == 8:
        for rank, cache in enumerate(target.caches):
            for own, whole in zip(cache.layers, source.caches[0].layers, strict=True):
                head = whole.blocks[SOURCES.tolist(), :, rank // 2]
                assert torch.equal(own.blocks[TARGETS.tolist(), :, 0], head)


@pytest.mark.parametrize("way", ["memory", "buffer"])
def test_blocks_of_several_groups_travel(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    use(way, monkeypatch)
    config = make_config(1, windows=(0, 5, 5))
    assert len(config.cache_layout.groups) > 1
    source, target = Replica(config), Replica(config, is_empty=True)
    counts = (1,) * (len(config.cache_layout.groups) - 1)
    reports = travel(stack, source, target, tmp_path, counts=(4 - len(counts), *counts))
    assert reports[0].failed.size == 0
    first = config.cache_layout.groups[0].layers[0]
    (own,), (other,) = target.caches, source.caches
    assert torch.equal(own.layers[first].blocks[1], other.layers[first].blocks[3])


@pytest.mark.parametrize("way", ["stream", "frames"])
def test_blocks_travel_encrypted_over_tcp(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    use(way, monkeypatch)
    source, target = Replica(make_config(2)), Replica(make_config(1), is_empty=True)
    reports = travel(stack, source, target, tmp_path, CurveKeys.generate())
    assert reports[0].failed.size == 0
    assert_arrived(source, target)


def read_states(
    stack: ExitStack, directory: Path, sizes: tuple[int, int], keys: CurveKeys | None = None, slot: int = -2
) -> tuple[Replica, Replica, list[KvReport]]:
    """Lend three blocks and the state in slot 2, and read the blocks and the state in a slot."""
    source = Replica(make_config(sizes[0]), has_states=True)
    target = Replica(make_config(sizes[1]), has_states=True, is_empty=True)
    return source, target, move_state(stack, source, target, directory, keys, slot)


@pytest.mark.parametrize("way", ["memory", "buffer", "stream", "frames"])
def test_states_travel_beside_blocks(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    use(way, monkeypatch)
    keys = CurveKeys.generate() if way in ("stream", "frames") else None
    source, target, reports = read_states(stack, tmp_path, (2, 2), keys)
    assert [report.failed.size for report in reports] == [0, 0]
    for lender, reader in zip(source.caches, target.caches, strict=True):
        for (theirs,), (own,) in zip(lender.states, reader.states, strict=True):
            assert torch.equal(own[3], theirs[2])
            assert not own[[0, 1, 2, 4]].any()
        for theirs_of, own_of in zip(lender.layers, reader.layers, strict=True):
            assert torch.equal(own_of.blocks[TARGETS[:3].tolist()], theirs_of.blocks[SOURCES[:3].tolist()])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("way", ["memory", "buffer"])
def test_ranks_of_any_sizes_exchange_heads_of_states(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], way: str
) -> None:
    """Sections of the convolution are slices of their own, and shared heads come from one rank."""
    use(way, monkeypatch)
    source, target = (replica_with_heads(size, is_empty=number > 0) for number, size in enumerate(sizes))
    reports = move_state(stack, source, target, tmp_path)
    assert [(report.name, report.failed.size) for report in reports] == [("", 0)] * sizes[1]
    for rank, cache in enumerate(target.caches):
        for (tensor,), part in zip(cache.states, states_of(rank, sizes[1]), strict=True):
            assert torch.equal(tensor[3], part)
            assert not tensor[[0, 1, 2, 4]].any()


def test_states_are_not_read_by_ranks_of_another_size(stack: ExitStack, tmp_path: Path) -> None:
    _, target, reports = read_states(stack, tmp_path, (2, 1))
    assert reports[0].name.startswith("refused: ")
    assert "tensor_parallel_size is 2, the other's 1" in reports[0].name
    assert reports[0].failed.tolist() == [0, 1, 2, 3]
    assert not any(own.any() for (own,) in target.caches[0].states)


@pytest.mark.parametrize("way", ["memory", "buffer"])
def test_slot_that_is_not_lent_is_not_read(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    use(way, monkeypatch)
    _, _, reports = read_states(stack, tmp_path, (1, 1), slot=-1)
    assert reports[0].name.startswith("stale: ")
    assert 3 in reports[0].failed


@pytest.mark.parametrize(("group", "number"), [(1, 2), (0, -2)])
def test_blocks_and_states_are_not_mistaken_for_each_other(group: int, number: int) -> None:
    replica = Replica(make_config(1), has_states=True)
    layout = layout_of(replica.config, 0, "w", states=replica.states)
    blocks = KvBlocks(replica.caches[0], replica.config.cache_layout, layout, CPU)
    heads = heads_to_read(layout, layout, group, [set() for _ in layout.transferred_groups[group].layers])
    content = np.empty(blocks.block_bytes(group, heads), np.uint8)
    with pytest.raises(ValueError, match=f"group {group} has no blocks"):
        blocks.gather(group, np.array([number], np.int32), heads, content)


@pytest.mark.parametrize("first", [0, 1])
def test_copies_on_a_cpu_and_on_a_gpu_have_one_order(first: int) -> None:
    """A rank on a GPU gathers by tensors, and one on a CPU by addresses: either reads what the other sends."""
    replica = Replica(make_config(1, dtype="int8"))
    layout = layout_of(replica.config, 0, "w")
    blocks = KvBlocks(replica.caches[0], replica.config.cache_layout, layout, CPU)
    heads = tuple((first, number) for number in (2, 0, 3))
    content = np.zeros(SOURCES.size * blocks.block_bytes(0, heads), np.uint8)
    blocks.gather(0, SOURCES, heads, content)
    for own, index, view in blocks._views(0, SOURCES, heads, content):
        assert torch.equal(own.index_select(0, index), view)
    for part in (part for layer in blocks._groups[0].layers for part in layer.parts):
        part.zero_()
    blocks.scatter(0, SOURCES, heads, content)
    for own, index, view in blocks._views(0, SOURCES, heads, content):
        assert view.any()
        assert torch.equal(own.index_select(0, index), view)


def test_rank_without_the_keys_reads_nothing(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SILENCE_S, 1.0)
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,) = source.services(stack, tmp_path, CurveKeys.generate())
    (reading,) = target.services(stack, tmp_path, CurveKeys.generate())
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    reading.apply_pulls(pull_of((endpoint,)))
    report = await_report(reading, KvReportKind.PULLED)
    assert report.name.startswith("unreachable: tcp://127.0.0.1")
    assert report.failed.tolist() == [0, 1, 2, 3]


def test_blocks_of_an_ended_lease_are_not_read(stack: ExitStack, tmp_path: Path) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    lending.apply(KvOrders(revoked=np.array([1], np.int32)))
    reading.apply_pulls(pull_of((endpoint,)))
    report = await_report(reading, KvReportKind.PULLED)
    assert report.name.startswith("stale: ")
    assert report.failed.tolist() == [0, 1, 2, 3]


def revoke_after_the_copy(monkeypatch: pytest.MonkeyPatch, lending: list[KvService]) -> None:
    copy_from = KvBlocks.copy_from

    def copy_and_lose(blocks: KvBlocks, *args: Any) -> None:
        copy_from(blocks, *args)
        lending[0].apply(KvOrders(revoked=np.array([1], np.int32)))

    monkeypatch.setattr(KvBlocks, "copy_from", copy_and_lose)


@pytest.mark.parametrize("way", ["memory", "buffer", "stream"])
def test_lease_that_ends_during_the_read_gives_nothing(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    use(way, monkeypatch)
    keys = CurveKeys.generate() if way == "stream" else None
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    lending: list[KvService] = []
    gather = KvBlocks.gather

    def gather_and_lose(
        blocks: KvBlocks, group: int, block_ids: IntArray, heads: object, into: object
    ) -> None:
        gather(blocks, group, block_ids, heads, into)  # type: ignore[arg-type]
        lending[0].apply(KvOrders(revoked=np.array([1], np.int32)))

    monkeypatch.setattr(KvBlocks, "gather", gather_and_lose)
    revoke_after_the_copy(monkeypatch, lending)
    lending += source.services(stack, tmp_path, keys)
    (reading,) = target.services(stack, tmp_path, keys)
    endpoint = await_report(lending[0], KvReportKind.SERVES).name
    lending[0].apply(GRANT)
    reading.apply_pulls(pull_of((endpoint,)))
    assert await_report(reading, KvReportKind.PULLED).name.startswith("stale: ")


def test_torn_bytes_are_detected(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("buffer", monkeypatch)
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    monkeypatch.setattr(
        transport,
        "checksum",
        lambda content: checksum(content) + (threading.current_thread().name == "kv-server"),
    )
    report = travel(stack, source, target, tmp_path)[0]
    assert report.name.startswith("corrupt: ")
    assert not target.caches[0].layers[0].blocks.any()


def test_other_layouts_are_refused_by_name(stack: ExitStack, tmp_path: Path) -> None:
    source = Replica(make_config(1))
    config = make_config(1)
    target = Replica(replace(config, model=replace(config.model, head_dim=4)), is_empty=True)
    report = travel(stack, source, target, tmp_path)[0]
    assert report.name.startswith("refused: ")
    assert "layers of group 0" in report.name


def no_answer(*args: object) -> None:
    """Fail as a message that is ignored does."""
    raise ProtocolError("not understood")


def test_peer_that_has_ended_is_unreachable_and_one_that_hangs_is_given_up(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    monkeypatch.setattr(transport.ZmqTransport, "_check", no_answer)
    monkeypatch.setattr(SILENCE_S, 1.0)
    while not await_pull(reading, endpoint).startswith("timeout: ipc://"):
        pass  # on a busy machine not even its greeting came in time
    lending.close()
    assert await_pull(reading, endpoint).startswith("unreachable: ipc://")


def test_canceled_pull_ends_at_once_and_releases_the_lease(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    monkeypatch.setattr(transport.ZmqTransport, "_check", no_answer)
    reading.apply_pulls(pull_of((endpoint,)))
    reading.apply_pulls(KvOrders(ended=np.array([1], np.int32)))
    assert await_report(reading, KvReportKind.PULLED).name.startswith("canceled: ")
    assert await_report(lending, KvReportKind.RELEASED).number == 1


def test_reads_renew_a_lease(stack: ExitStack, tmp_path: Path) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    reading.apply_pulls(pull_of((endpoint,)))
    await_report(reading, KvReportKind.PULLED)
    assert await_report(lending, KvReportKind.RENEWED).number == 1


def test_checksum_detects_changes_anywhere() -> None:
    content = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 13, np.uint8)
    whole = checksum(content)
    for place in (0, 4095, 4096, content.size - 1):
        changed = content.copy()
        changed[place] ^= 1
        assert checksum(changed) != whole
    swapped = content.copy()
    swapped[:4096], swapped[4096:8192] = content[4096:8192], content[:4096]
    assert checksum(swapped) != whole
    assert checksum(content[:-1]) != whole


def test_foreign_messages_are_ignored(stack: ExitStack, tmp_path: Path) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,) = source.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    layout = layout_of(target.config, 0, "w")
    peer = Peer(endpoint, None, KvBlocks(target.caches[0], target.config.cache_layout, layout, CPU))
    stack.callback(peer.close)
    peer._line._socket.send(b"nonsense")
    assert peer.hello(layout_of(target.config, 0, "w"), 60.0).weights_version == "w"


def test_memory_of_a_reader_that_reads_no_more_is_unmapped(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("buffer", monkeypatch)
    monkeypatch.setattr(transport, "MAPPED_S", 0.02)
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    assert not travel(stack, source, target, tmp_path)[0].failed.size
    deadline = time.monotonic() + 60
    while "quire-transfer" in Path("/proc/self/maps").read_text():
        assert time.monotonic() < deadline, "the lender keeps the memory of a reader that is gone"
        threading.Event().wait(0.01)


def test_address_that_cannot_be_connected_is_unreachable(stack: ExitStack, tmp_path: Path) -> None:
    (reading,) = Replica(make_config(1), is_empty=True).services(stack, tmp_path)
    assert await_pull(reading, f"ipc://{'x' * 200}#i").startswith("unreachable: ipc://xxx")
    reading.apply_pulls(KvOrders(ended=np.array([1], np.int32)))  # and the lease is not released
    assert await_pull(reading, f"ipc://{'y' * 200}#i").startswith("unreachable: ipc://yyy")


def test_message_that_cannot_be_answered_leaves_other_readers_theirs(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)

    def fail(*args: object) -> None:
        raise IndexError("no such block")

    with monkeypatch.context() as broken:
        broken.setattr(transport.ZmqTransport, "_check", fail)
        broken.setattr(SILENCE_S, 0.2)
        assert await_pull(reading, endpoint)
    assert await_pull(reading, endpoint) == ""
    assert_arrived(source, target)


@pytest.mark.parametrize("is_cut", [False, True])
def test_blocks_that_are_not_where_they_are_said_to_be_are_not_mapped(is_cut: bool) -> None:
    """A reader that believed it would read other memory of its own, or end."""
    replica = Replica(make_config(1))
    (cache,) = replica.caches
    found = KvBlocks(cache, replica.config.cache_layout, layout_of(replica.config, 0, "w"), CPU).map
    assert found is not None
    MappedBlocks(found)
    planes = Planes.unpack(found.planes).table.copy()
    planes[-1, 5] += SEGMENT_BYTES
    wrong = found.planes[:-1] if is_cut else planes.tobytes()
    with pytest.raises(ValueError, match=r"not within the .* bytes of their segment|buffer size"):
        MappedBlocks(replace(found, planes=wrong))


def test_mapped_memory_of_a_lender_is_freed_with_the_read(stack: ExitStack, tmp_path: Path) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    assert source.caches[0].segment is not None
    name = source.caches[0].segment.address.name
    assert not travel(stack, source, target, tmp_path)[0].failed.size
    assert_arrived(source, target)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    assert len(mapped) == 1, "only the owner's mapping is left"


def test_stream_admits_only_holders_of_a_token(stack: ExitStack, tmp_path: Path) -> None:
    (lending,) = Replica(make_config(1)).services(stack, tmp_path, CurveKeys.generate())
    streams = lending._transport._streams
    assert streams is not None
    offer = streams.offer()
    for token in (b"x" * 16, offer.token, offer.token):  # the third one comes too late
        with socket.create_connection(("127.0.0.1", offer.port), 60) as connection:
            connection.sendall(token)
            stream = SealedStream(connection, b"k" * 32, is_server=False, max_bytes=1024)
            with suppress(OSError):  # the server may have closed already
                stream.send(b"with another key", 60.0)
            with pytest.raises(OSError, match=r"closed|reset"):
                stream.receive(60.0)


@pytest.mark.parametrize("is_changed", [False, True])
def test_stream_refuses_what_was_not_sent(is_changed: bool) -> None:
    left, right = make_tcp_pair()
    with left, right:
        sender = SealedStream(left, b"k" * 32, is_server=True, max_bytes=64)
        receiver = SealedStream(right, b"k" * 32, is_server=False, max_bytes=64)
        assert receiver.receive(0.01) is None
        sender.send(b"first", 60.0)
        assert bytes(receiver.receive(60.0) or b"") == b"first"
        if is_changed:
            left.sendall(bytes([21, 0, 0, 0]) + bytes(21))
        else:
            sender.send(bytes(65), 60.0)
        with pytest.raises(ValueError, match=r"not what the other end sent|has 81 bytes"):
            receiver.receive(60.0)


def make_tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right
