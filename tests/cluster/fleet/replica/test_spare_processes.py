"""Spare processes: which nodes are asked for how many, with stand-ins for the raylets."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
import ray

from quire.cluster.fleet.replica.process_starter import SpareProcesses, raylet_addresses

DEADLINE_S = 60.0


class FakeRaylets:
    """Raylets with so many idle processes each; one without a number does not answer."""

    def __init__(self, num_idle: dict[str, int]) -> None:
        self.num_idle = num_idle
        self.asked: list[str] = []

    def num_idle_processes(self, address: str, timeout_s: float) -> int:
        self.asked.append(address)
        if address not in self.num_idle:
            raise grpc.RpcError("unavailable")
        return self.num_idle[address]

    def start_idle_processes(self, address: str, count: int, timeout_s: float) -> None:
        self.num_idle[address] += count


def node(name: str, *, is_alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": name, "NodeManagerPort": 7, "Alive": is_alive}


def replenish(monkeypatch: pytest.MonkeyPatch, spares: SpareProcesses, *nodes: dict[str, Any]) -> None:
    """Replenish, and wait until it is done."""
    monkeypatch.setattr(ray, "nodes", lambda: list(nodes))
    before = set(threading.enumerate())
    spares.replenish()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_replenish_starts_what_is_missing_on_each_node_of_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raylets = FakeRaylets({"a:7": 0, "b:7": 3, "c:7": 0})
    spares = SpareProcesses(("a", "b", "a"), 2, raylets)
    replenish(monkeypatch, spares, node("a"), node("b"), node("c"))
    assert raylets.num_idle == {"a:7": 2, "b:7": 3, "c:7": 0}
    assert sorted(raylets.asked) == ["a:7", "b:7"]


def test_replenish_goes_on_after_a_raylet_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raylets = FakeRaylets({"b:7": 0})
    spares = SpareProcesses(("a", "b", "gone"), 1, raylets)
    replenish(monkeypatch, spares, node("a"), node("b"), node("gone", is_alive=False))
    assert raylets.num_idle == {"b:7": 1}
    assert "no spare processes were started on a:7" in caplog.text


def test_no_spares_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    raylets = FakeRaylets({"a:7": 0})
    replenish(monkeypatch, SpareProcesses(("a",), 0, raylets), node("a"))
    assert raylets.asked == []


def test_addresses_are_those_of_live_nodes() -> None:
    assert raylet_addresses([node("a"), node("b", is_alive=False)]) == {"a": "a:7"}
