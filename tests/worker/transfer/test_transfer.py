"""Blocks that ranks of different replicas read from each other, over real sockets and shared memory."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import small_config

from quire.proto.block_tables import IntArray
from quire.proto.config import EngineConfig
from quire.proto.errors import ProtocolError
from quire.proto.kv_layout import layout_of
from quire.proto.kv_transfer import KvGrant, KvOrders, KvPull, KvReport, KvReportKind
from quire.proto.transport.network import CurveKeys
from quire.worker.memory.cache_engine import CacheEngine
from quire.worker.memory.checksum import checksum
from quire.worker.transfer import peers, transport
from quire.worker.transfer.kv_blocks import KvBlocks
from quire.worker.transfer.peers import Peer
from quire.worker.transfer.process_memory import Addresses, MemoryMap, ProcessMemory
from quire.worker.transfer.sealed_stream import SealedStream
from quire.worker.transfer.service import KvService

NUM_BLOCKS = 12
SOURCES = np.array([3, 7, 5, 9], np.int32)
TARGETS = np.array([1, 2, 4, 8], np.int32)
CPU = torch.device("cpu")
SILENCE_S = "quire.worker.transfer.service.SILENCE_S"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no peer count as silent because its thread had to wait for a processor."""
    monkeypatch.setattr(SILENCE_S, 60.0)


def make_config(size: int, *, windows: tuple[int, ...] = (0, 0, 0), dtype: str = "auto") -> EngineConfig:
    config = small_config(layer_windows=windows, num_blocks=NUM_BLOCKS)
    model = replace(config.model, num_kv_heads=4, num_heads=4, head_dim=8)
    cache = replace(config.cache, kv_cache_dtype=dtype)
    return replace(
        config, model=model, cache=cache, parallel=replace(config.parallel, tensor_parallel_size=size)
    )


class Replica:
    """The caches of a replica's ranks, with content that names layer, part, head, block and token."""

    def __init__(self, config: EngineConfig, *, is_empty: bool = False) -> None:
        self.config, self.size = config, config.parallel.tensor_parallel_size
        self.caches = [CacheEngine(config, NUM_BLOCKS, 0, torch.float32, CPU) for _ in range(self.size)]
        if not is_empty:
            for rank, cache in enumerate(self.caches):
                for layer, each in enumerate(cache.layers):
                    for tensor in (each.blocks, *([] if each.scales is None else [each.scales])):
                        tensor.copy_(self._content(tensor, layer, rank))

    def _content(self, tensor: torch.Tensor, layer: int, rank: int) -> torch.Tensor:
        shape = (*tensor.shape[:2], tensor.shape[2] * self.size, *tensor.shape[3:])
        whole = (torch.arange(int(np.prod(shape))).reshape(shape) * 7 + layer) % 113
        return whole.narrow(2, rank * tensor.shape[2], tensor.shape[2]).to(tensor.dtype)

    def services(self, stack: ExitStack, directory: Path, keys: CurveKeys | None = None) -> list[KvService]:
        found = []
        for rank, cache in enumerate(self.caches):
            layout = layout_of(self.config, rank, "w")
            blocks = KvBlocks(cache, self.config.cache_layout, layout, CPU)
            endpoint = f"ipc://{directory}/{id(self)}-{rank}.kv" if keys is None else "tcp://127.0.0.1:*"
            found.append(KvService(blocks, "w", endpoint, keys, lambda body: body()))
            stack.callback(found[-1].close)
        return found


def await_report(service: KvService, kind: KvReportKind) -> KvReport:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for report in service.take_reports(is_idle=True):
            if report.kind is kind:
                return report
    raise AssertionError(f"no report {kind}")


def pull_of(endpoints: tuple[str, ...], counts: tuple[int, ...] = (4,), timeout_s: float = 60.0) -> KvOrders:
    order = KvPull(1, 1, endpoints, np.array(counts, np.int32), SOURCES, TARGETS, timeout_s)
    return KvOrders(pulls=(order,))


GRANT = KvOrders(grants=(KvGrant(1, SOURCES),))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def travel(
    stack: ExitStack, source: Replica, target: Replica, directory: Path, keys: CurveKeys | None = None,
    counts: tuple[int, ...] = (4,), before: Callable[[], None] = lambda: None,
) -> list[KvReport]:  # fmt: skip
    lending, reading = source.services(stack, directory, keys), target.services(stack, directory, keys)
    endpoints = tuple(await_report(each, KvReportKind.SERVES).name for each in lending)
    for each in lending:
        each.apply(GRANT)
    before()
    for each in reading:
        each.apply(pull_of(endpoints, counts))
    return [await_report(each, KvReportKind.PULLED) for each in reading]


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks come by one way: memory of the lender, buffer of the reader, stream, or frames."""
    if way != "memory":  # as from a GPU, or from another host
        monkeypatch.setattr(ProcessMemory, "open", staticmethod(lambda memory: None))
    if way in ("stream", "frames"):
        monkeypatch.setattr(peers._Buffer, "address", lambda self, num_bytes: None)
    if way == "frames":
        monkeypatch.setattr(peers, "_connect_stream", lambda endpoint, offer: None)


def assert_arrived(source: Replica, target: Replica, layers: range = range(3)) -> None:
    """Check that the targets have the content of the sources, in all heads."""
    for layer in layers:
        for kind in ("blocks", "scales"):
            owned = [getattr(cache.layers[layer], kind) for cache in source.caches]
            taken = [getattr(cache.layers[layer], kind) for cache in target.caches]
            if owned[0] is None:
                continue
            whole, found = torch.cat(owned, 2), torch.cat(taken, 2)
            assert torch.equal(found[TARGETS.tolist()], whole[SOURCES.tolist()])
            others = [block for block in range(NUM_BLOCKS) if block not in TARGETS]
            assert not found[others].to(torch.float32).any(), "a block changed that nobody pulled"


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


def test_rank_without_the_keys_reads_nothing(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SILENCE_S, 1.0)
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,) = source.services(stack, tmp_path, CurveKeys.generate())
    (reading,) = target.services(stack, tmp_path, CurveKeys.generate())
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    reading.apply(pull_of((endpoint,)))
    report = await_report(reading, KvReportKind.PULLED)
    assert report.name.startswith("unreachable: tcp://127.0.0.1")
    assert report.failed.tolist() == [0, 1, 2, 3]


def test_blocks_of_an_ended_lease_are_not_read(stack: ExitStack, tmp_path: Path) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    lending.apply(KvOrders(revoked=np.array([1], np.int32)))
    reading.apply(pull_of((endpoint,)))
    report = await_report(reading, KvReportKind.PULLED)
    assert report.name.startswith("stale: ")
    assert report.failed.tolist() == [0, 1, 2, 3]


def revoke_after_the_copy(monkeypatch: pytest.MonkeyPatch, lending: list[KvService]) -> None:
    read = ProcessMemory.read

    def read_and_lose(memory: ProcessMemory, own: Addresses, others: Addresses, lengths: Addresses) -> None:
        read(memory, own, others, lengths)
        if lengths.sum() > 32:  # not the proof of identity
            lending[0].apply(KvOrders(revoked=np.array([1], np.int32)))

    monkeypatch.setattr(ProcessMemory, "read", read_and_lose)


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
    reading.apply(pull_of((endpoint,)))
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


def await_pull(reading: KvService, endpoint: str) -> str:
    """Pull the blocks, and return why they have not come."""
    reading.apply(pull_of((endpoint,)))
    return await_report(reading, KvReportKind.PULLED).name


def test_canceled_pull_ends_at_once_and_releases_the_lease(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    monkeypatch.setattr(transport.ZmqTransport, "_check", no_answer)
    reading.apply(pull_of((endpoint,)))
    reading.apply(KvOrders(ended=np.array([1], np.int32)))
    assert await_report(reading, KvReportKind.PULLED).name.startswith("canceled: ")
    assert await_report(lending, KvReportKind.RELEASED).number == 1


def test_reads_renew_a_lease(stack: ExitStack, tmp_path: Path) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = source.services(stack, tmp_path), target.services(stack, tmp_path)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    reading.apply(pull_of((endpoint,)))
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


def test_memory_of_another_process_of_that_number_is_not_read() -> None:
    content = np.zeros(8, np.uint8)
    memory = MemoryMap(os.getpid(), content.ctypes.data, b"12345678", b"")
    assert ProcessMemory.open(memory) is None
    assert ProcessMemory.open(replace(memory, proof_address=8)) is None  # nothing is there
    assert ProcessMemory.open(replace(memory, proof=bytes(8))) is not None


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
