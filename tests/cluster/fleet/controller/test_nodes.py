"""NodeWatch: departures of nodes and their deadlines."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from quire.cluster.fleet.controller.fleet_state import NodeEntry
from quire.cluster.fleet.controller.nodes import TAKEOVER_TIMEOUT_S, NodeWatch

NODE = "node-0"
NOW, UNIX_NOW = 1000.0, 1_700_000_000.0


class Cloud:
    """The part of a Launcher that the watch uses: notices, the latest last."""

    def __init__(self) -> None:
        self.notices: list[Future[float]] = []

    def notice(self, node_id: str) -> Future[float]:
        self.notices.append(Future())
        return self.notices[-1]


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def departed() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def watch(cloud: Cloud, departed: asyncio.Event) -> NodeWatch:
    return NodeWatch(cloud, lambda: NOW, lambda: UNIX_NOW, departed.set)  # type: ignore[arg-type]


def node(**more: Any) -> NodeEntry:
    return NodeEntry(NODE, "127.0.0.1", **more)


async def test_earliest_departure_deadline_counts(
    watch: NodeWatch, cloud: Cloud, departed: asyncio.Event
) -> None:
    watch.update((node(),), [NODE])
    assert watch.departure_of([NODE]) is None
    watch.depart(NODE, TAKEOVER_TIMEOUT_S, "an operator drains it")
    cloud.notices[0].set_result(30.0)
    departed.clear()
    await departed.wait()
    departure = watch.departure_of([NODE])
    assert departure is not None
    assert (departure.deadline, departure.reason) == (NOW + 30.0, f"the cloud takes node {NODE} back")
    watch.update((node(is_draining=True, gone_at=UNIX_NOW + 60),), [NODE])
    assert watch.departure_of([NODE]) == departure
    watch.update((), [])
    assert watch.departure_of([NODE]) is None


async def test_failed_notice_watcher_is_restarted(
    watch: NodeWatch, cloud: Cloud, departed: asyncio.Event
) -> None:
    watch.update((node(),), [NODE])
    watch.update((node(),), [NODE])
    assert len(cloud.notices) == 1
    cloud.notices[0].set_exception(ConnectionError("the watcher's process died"))
    while len(cloud.notices) == 1:
        await asyncio.sleep(0)
        watch.update((node(),), [NODE])
    assert watch.departure_of([NODE]) is None
    cloud.notices[1].set_result(30.0)
    await departed.wait()
    assert watch.departure_of([NODE]) is not None
