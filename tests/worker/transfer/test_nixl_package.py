"""Blocks that come through the agents of the installed package, over UCX's TCP, from another process."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kv_lender import lender_process
from kv_replicas import Replica, assert_arrived, await_pull, await_report, make_config, pull_of

from quire.proto.kv_transfer import KvReportKind
from quire.worker.transfer import nixl
from quire.worker.transfer.service import KvService

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

SILENCE_S = "quire.worker.transfer.service.SILENCE_S"


@pytest.fixture(autouse=True)
def tcp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(SILENCE_S, 60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[nixl.NixlRead]:
    """The reads that have begun."""
    return watch_reads(monkeypatch)


def watch_reads(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> list[nixl.NixlRead]:
    reads, begin = list[nixl.NixlRead](), nixl.NixlEnd.begin

    def watched(end: nixl.NixlEnd, *args: Any) -> nixl.NixlRead:
        before()
        reads.append(begin(end, *args))
        after()
        return reads[-1]

    monkeypatch.setattr(nixl.NixlEnd, "begin", watched)
    return reads


def open_reader(stack: ExitStack, directory: Path) -> tuple[Replica, KvService]:
    target = Replica(make_config(1), is_empty=True)
    (reading,) = target.services(stack, directory, has_nixl=True)
    return target, reading


@pytest.mark.parametrize(("lenders", "readers"), [(1, 1), (2, 1), (1, 2)])
def test_blocks_of_another_process_arrive(
    stack: ExitStack, tmp_path: Path, begun: list[nixl.NixlRead], lenders: int, readers: int
) -> None:
    lender = stack.enter_context(lender_process(tmp_path, lenders))
    target = Replica(make_config(readers), is_empty=True)
    reading = target.services(stack, tmp_path, has_nixl=True)
    for each in reading:
        each.apply_pulls(pull_of(lender.endpoints))
    assert [await_report(each, KvReportKind.PULLED).name for each in reading] == [""] * readers
    assert_arrived(Replica(make_config(lenders)), target)
    assert len(begun) == max(lenders, readers)


def test_lender_that_is_killed_during_a_read_is_unreachable(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = stack.enter_context(lender_process(tmp_path))
    target, reading = open_reader(stack, tmp_path)
    reads = watch_reads(
        monkeypatch, lambda: lender.send_signal(signal.SIGSTOP), lambda: lender.send_signal(signal.SIGKILL)
    )
    problem = await_pull(reading, lender.endpoints[0])
    assert problem.startswith("unreachable: ipc://")
    assert "DISCONNECT" in problem
    assert len(reads) == 1
    with lender_process(tmp_path) as successor:
        assert await_pull(reading, successor.endpoints[0]) == ""
    assert_arrived(Replica(make_config(1)), target)


def test_lender_that_hangs_writes_nothing_later(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the reader belong to others once it has reported the end of the read."""
    lender = stack.enter_context(lender_process(tmp_path))
    target, reading = open_reader(stack, tmp_path)
    reads = watch_reads(monkeypatch, lambda: lender.send_signal(signal.SIGSTOP))
    monkeypatch.setattr(SILENCE_S, 1.5)
    assert await_pull(reading, lender.endpoints[0]).startswith("timeout: ")
    assert len(reads) == 1
    (cache,) = target.caches
    for layer in cache.layers:
        layer.blocks.fill_(7)
    lender.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert all((layer.blocks == 7).all() for layer in cache.layers)
    monkeypatch.setattr(SILENCE_S, 60.0)
    for layer in cache.layers:
        layer.blocks.zero_()
    assert await_pull(reading, lender.endpoints[0]) == ""
    assert len(reads) == 1, "the next one goes another way"
    assert_arrived(Replica(make_config(1)), target)


def test_agents_end_with_their_service(tmp_path: Path, begun: list[nixl.NixlRead]) -> None:
    with lender_process(tmp_path) as lender:
        for _ in range(3):
            with ExitStack() as stack:
                _, reading = open_reader(stack, tmp_path)
                assert await_pull(reading, lender.endpoints[0]) == ""
    assert len(begun) == 3
