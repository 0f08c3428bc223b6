"""Blocks that come by NIXL: through agents that copy memory in one process, and through real ones, if installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_nixl import FakeNixl, FakeRead
from kv_replicas import (
    CPU,
    GRANT,
    NUM_BLOCKS,
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
from stand_in_gpu import installed

from quire.proto.errors import ConfigError
from quire.proto.kv_layout import layout_of
from quire.proto.kv_transfer import KvOrders, KvReportKind
from quire.worker.memory.cache_engine import CacheEngine
from quire.worker.transfer import nixl
from quire.worker.transfer.kv_blocks import KvBlocks
from quire.worker.transfer.messages import Hello
from quire.worker.transfer.planes import Planes
from quire.worker.transfer.service import KvService


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no peer count as silent because its thread had to wait for a processor."""
    monkeypatch.setattr("quire.worker.transfer.service.SILENCE_S", 60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    made = FakeNixl()
    made.install(monkeypatch)
    return made


def open_pair(
    stack: ExitStack, directory: Path, source: Replica | None = None, target: Replica | None = None
) -> tuple[KvService, KvService, str]:
    """Return a lender with its lease granted, a reader, and the lender's endpoint."""
    source = source or Replica(make_config(1))
    target = target or Replica(make_config(1), is_empty=True)
    (lending,), (reading,) = (each.services(stack, directory, has_nixl=True) for each in (source, target))
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    return lending, reading, endpoint


@pytest.mark.parametrize(("lenders", "readers"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_ranks_of_any_sizes_exchange_heads(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, lenders: int, readers: int, dtype: str
) -> None:
    source = Replica(make_config(lenders, dtype=dtype))
    target = Replica(make_config(readers, dtype=dtype), is_empty=True)
    reports = travel(stack, source, target, tmp_path, has_nixl=True)
    assert [(report.name, report.failed.size) for report in reports] == [("", 0)] * readers
    assert_arrived(source, target)
    assert network.num_reads == max(lenders, readers)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (8, 2)], ids=str)
def test_ranks_of_any_sizes_exchange_heads_of_states(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, sizes: tuple[int, int]
) -> None:
    source, target = (replica_with_heads(size, is_empty=number > 0) for number, size in enumerate(sizes))
    reports = move_state(stack, source, target, tmp_path, has_nixl=True)
    assert [(report.name, report.failed.size) for report in reports] == [("", 0)] * sizes[1]
    assert network.num_reads
    for rank, cache in enumerate(target.caches):
        for (tensor,), part in zip(cache.states, states_of(rank, sizes[1]), strict=True):
            assert torch.equal(tensor[3], part)
            assert not tensor[[0, 1, 2, 4]].any()


def test_blocks_on_a_gpu_are_registered_and_compared_there(
    network: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stand-in, whose ops run in this thread alone."""
    source = Replica(make_config(1))
    with installed(monkeypatch) as gpu:
        found = []
        for number in range(2):
            device, config = torch.device("cuda", 0), source.config
            cache = CacheEngine(config, NUM_BLOCKS, 0, torch.float32, device)
            for layer, others in zip(cache.layers, source.caches[0].layers, strict=True):
                layer.blocks.copy_(others.blocks * (number == 0))
            found.append(KvBlocks(cache, config.cache_layout, layout_of(config, 0, "w"), device))
            found[-1].mark_written()
        lender, reader = found
        lending, reading = (nixl.NixlEnd(each) for each in found)
        num_waits = gpu.num_syncs["event.synchronize"]
        lender.await_written()
        assert gpu.num_syncs["event.synchronize"] == num_waits + 1
        heads = ((1, 2),) * 3
        expected = lender.checksum(0, SOURCES, heads)
        assert reader.checksum(0, TARGETS, heads) != expected
        pieces = reader.pieces(Planes.unpack(lending.memory.planes), 0, 0, heads, SOURCES, TARGETS)
        assert reading.begin(lending.memory, *pieces).poll()
        assert reader.checksum(0, TARGETS, heads) == expected
    assert {(agent.kind, agent.registered[0][0][2]) for agent in network.agents.values()} == {("VRAM", 0)}
    on_host = KvBlocks(source.caches[0], source.config.cache_layout, layout_of(source.config, 0, "w"), CPU)
    assert on_host.checksum(0, SOURCES, heads) == expected


def test_neighboring_pieces_are_read_as_one() -> None:
    into, theirs, lengths = (
        np.array(each, np.uint64) for each in ([40, 0, 10, 20, 60], [140, 0, 10, 30, 70], [5, 10, 10, 7, 0])
    )
    joined = nixl._join(into, theirs, lengths)
    assert [each.tolist() for each in joined] == [[0, 20, 40], [0, 30, 140], [20, 7, 5]]


def test_bytes_that_changed_on_the_way_are_not_used(
    stack: ExitStack, tmp_path: Path, network: FakeNixl
) -> None:
    _, reading, endpoint = open_pair(stack, tmp_path)
    changed = np.full(8, 255, np.uint8)

    def change(read: FakeRead) -> str:
        read.copy()
        read.others = read.others.copy()
        read.others[0, 0], read.own[0, 1] = changed.ctypes.data, 8
        read.copy()
        return "DONE"

    network.on_read = change
    assert await_pull(reading, endpoint).startswith("corrupt: ")


def test_lease_that_ends_while_the_checksum_is_computed_gives_no_blocks(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending, reading, endpoint = open_pair(stack, tmp_path)
    compute = KvBlocks.checksum

    def end(blocks: KvBlocks, *args: Any) -> int:
        if blocks is lending._blocks:
            lending.apply(KvOrders(revoked=np.array([1], np.int32)))
        return compute(blocks, *args)

    monkeypatch.setattr(KvBlocks, "checksum", end)
    assert await_pull(reading, endpoint).startswith("stale: ")


@pytest.mark.parametrize("is_written", [False, True])
def test_lease_that_ends_during_a_read_gives_no_blocks(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, is_written: bool
) -> None:
    source = Replica(make_config(1))
    lending, reading, endpoint = open_pair(stack, tmp_path, source)

    def end(read: FakeRead) -> None:
        lending.apply(KvOrders(revoked=np.array([1], np.int32)))
        if is_written:  # the step after
            source.caches[0].layers[0].blocks[3] += 1

    network.on_read = end
    assert await_pull(reading, endpoint).startswith("stale: ")


def raise_error(read: FakeRead) -> str:
    raise RuntimeError("NIXL_ERR_BACKEND")


@pytest.mark.parametrize("fail", [lambda read: "ERR", raise_error], ids=["state", "error"])
def test_failed_read_ends_its_agent_and_the_next_one_goes_another_way(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, caplog: pytest.LogCaptureFixture, fail: object
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    _, reading, endpoint = open_pair(stack, tmp_path, source, target)
    num_agents = len(network.agents)
    network.on_read = fail  # type: ignore[assignment]
    assert await_pull(reading, endpoint).startswith("unreachable: ipc://")
    assert len(network.agents) == num_agents - 1
    assert await_pull(reading, endpoint) == ""
    assert_arrived(source, target)
    assert network.num_reads == 1
    assert "could not be read by NIXL: its blocks come another way" in caplog.text


def test_error_of_a_read_does_not_keep_its_agent_alive(network: FakeNixl) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    blocks = [
        KvBlocks(each.caches[0], each.config.cache_layout, layout_of(each.config, 0, "w"), CPU)
        for each in (source, target)
    ]
    lending, reading = (nixl.NixlEnd(each) for each in blocks)
    pieces = blocks[1].pieces(Planes.unpack(lending.memory.planes), 0, 0, ((0, 4),) * 3, SOURCES, TARGETS)
    begun = reading.begin(lending.memory, *pieces)
    network.on_read = raise_error
    with pytest.raises(nixl.NixlError, match="RuntimeError: NIXL_ERR_BACKEND") as caught:
        begun.poll()
    assert len(network.agents) == 4
    reading.end(lending.memory, [begun])
    assert len(network.agents) == 3, caught.value


def test_peer_that_was_killed_is_unreachable(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending, reading, endpoint = open_pair(stack, tmp_path)

    network.polls_needed = 2
    begin = nixl.NixlEnd.begin

    def begin_and_kill(end: nixl.NixlEnd, *args: object) -> nixl.NixlRead:
        begun = begin(end, *args)  # type: ignore[arg-type]
        lending._transport._nixl.close()  # type: ignore[union-attr]
        return begun

    monkeypatch.setattr(nixl.NixlEnd, "begin", begin_and_kill)
    problem = await_pull(reading, endpoint)
    assert problem.startswith("unreachable: ipc://")
    assert "REMOTE_DISCONNECT" in problem


@pytest.mark.parametrize("is_canceled", [False, True])
def test_agent_whose_read_has_not_ended_is_gone_before_the_blocks_are_free(
    stack: ExitStack,
    tmp_path: Path,
    network: FakeNixl,
    monkeypatch: pytest.MonkeyPatch,
    is_canceled: bool,
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    lending, reading, endpoint = open_pair(stack, tmp_path, source, target)
    serving = {lending._transport._nixl.memory.agent, reading._transport._nixl.memory.agent}  # type: ignore[union-attr]
    network.polls_needed = 1 << 30
    monkeypatch.setattr(nixl, "_END_TIMEOUT_S", 0.01)
    monkeypatch.setattr(nixl, "_LONG_S", 0.1)
    if not is_canceled:
        monkeypatch.setattr("quire.worker.transfer.service.SILENCE_S", 0.3)
    reading.apply_pulls(pull_of((endpoint,)))
    if is_canceled:
        deadline = time.monotonic() + 60
        while not network.num_reads:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        reading.apply_pulls(KvOrders(ended=np.array([1], np.int32)))
    problem = await_report(reading, KvReportKind.PULLED).name
    assert problem.startswith("canceled: " if is_canceled else "timeout: ")
    readers = [agent for name, agent in network.agents.items() if not agent.config.enable_pthread]
    assert len(readers) == 1, "the lender's alone is left"
    assert serving <= set(network.agents)
    if not is_canceled:  # the network may not let NIXL through
        network.polls_needed = 1
        monkeypatch.setattr("quire.worker.transfer.service.SILENCE_S", 60.0)
        assert await_pull(reading, endpoint) == ""
        assert network.num_reads == 1
        assert_arrived(source, target)


@pytest.mark.parametrize("has_reader", [False, True])
def test_nixl_reads_only_where_both_ranks_have_it(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, caplog: pytest.LogCaptureFixture, has_reader: bool
) -> None:
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    (lending,) = source.services(stack, tmp_path, has_nixl=not has_reader)
    (reading,) = target.services(stack, tmp_path, has_nixl=has_reader)
    endpoint = await_report(lending, KvReportKind.SERVES).name
    lending.apply(GRANT)
    assert await_pull(reading, endpoint) == await_pull(reading, endpoint) == ""
    assert_arrived(source, target)
    assert not network.num_reads
    hello = Hello(endpoint.partition("#")[2], reading._blocks.layout, wants_nixl=has_reader)
    assert lending._transport._welcome(hello, lending._blocks).nixl is None, "older releases do not know it"
    assert caplog.text.count("does not serve by NIXL: its blocks come another way") == has_reader


def test_memory_that_cannot_be_registered_is_served_another_way(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*args: object) -> None:
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    monkeypatch.setattr("fake_nixl.FakeAgent.register_memory", refuse)
    source, target = Replica(make_config(1)), Replica(make_config(1), is_empty=True)
    _, reading, endpoint = open_pair(stack, tmp_path, source, target)
    assert await_pull(reading, endpoint) == ""
    assert_arrived(source, target)
    assert "blocks travel without NIXL: NixlError: RuntimeError: NIXL_ERR_NOT_FOUND" in caplog.text


def test_agents_end_with_their_service(tmp_path: Path, network: FakeNixl) -> None:
    with ExitStack() as stack:
        _, reading, endpoint = open_pair(stack, tmp_path)
        assert await_pull(reading, endpoint) == ""
        assert len(network.agents) == 4
    assert not network.agents


def test_reader_forgets_the_lenders_that_it_read_long_ago(
    stack: ExitStack, tmp_path: Path, network: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MAX_REMOTES", 2)
    (reading,) = Replica(make_config(1), is_empty=True).services(stack, tmp_path, has_nixl=True)
    for _ in range(4):
        (lending,) = Replica(make_config(1)).services(stack, tmp_path, has_nixl=True)
        lending.apply(GRANT)
        assert await_pull(reading, await_report(lending, KvReportKind.SERVES).name) == ""
    (agent,) = (each for each in network.agents.values() if each.remotes)
    assert len(agent.remotes) == 2


def test_nixl_that_is_not_installed_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"NIXL is not installed \(no module nixl\); pip install 'quire\[nixl\]'"
    ):
        nixl.check_nixl_is_installed()
