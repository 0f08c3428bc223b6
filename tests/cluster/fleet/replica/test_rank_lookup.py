"""Peers that are asked for weights or copies answer within one deadline, however many there are."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.fleet.replica import rank_lookup
from quire.cluster.fleet.replica.rank_lookup import find_copies, find_weights
from quire.worker import NodePeers, WeightSource


@dataclass(frozen=True)
class _Call:
    replica_id: str
    role: str
    num_readers: int = 0  # of copies


class FakeRay:
    """Ray with the ranks of replicas, some of which never answer; ray.util lists no standby.

    Attributes:
        waited_s: time of all waits together.
    """

    def __init__(self, hung: set[str]) -> None:
        self.hung, self.waited_s = hung, 0.0
        self.util = SimpleNamespace(list_named_actors=lambda all_namespaces: [])

    def get_actor(self, name: str, namespace: str) -> Any:
        _, replica_id, role = name.split("/")
        if replica_id == "gone":
            raise ValueError(name)
        return self.worker(replica_id, role)

    def worker(self, replica_id: str, role: str) -> Any:
        call = _Call(replica_id, role)
        return SimpleNamespace(
            weight_source=SimpleNamespace(remote=lambda replica_id, over_network: call),
            copy_sources=SimpleNamespace(
                remote=lambda replica_id, num_readers: replace(call, num_readers=num_readers)
            ),
        )

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        late = [each for each in calls if each.replica_id in self.hung]
        self.waited_s += timeout if late else 0.0
        return [each for each in calls if each not in late], late

    def get(self, call: Any) -> Any:
        owner = f"{call.role} of {call.replica_id}"
        if not call.num_readers:
            return WeightSource(owner, ())
        if call.replica_id == "uncached":
            return None
        node = "node-1" if call.replica_id == "neighbor" else ""
        return tuple(
            WeightSource(owner, (), f"for {number}", node=node) for number in range(call.num_readers)
        )


def test_hung_peers_are_waited_for_once_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake = FakeRay({"slow", "slower"})
    monkeypatch.setattr(rank_lookup, "ray", fake)
    found = find_weights(2, ["slow", "gone", "good", "slower"], "space", over_network=False)
    assert [[each.owner for each in of_rank] for of_rank in found] == [
        ["rank-0 of good"],
        ["rank-1 of good"],
    ]
    assert fake.waited_s <= rank_lookup._WEIGHTS_TIMEOUT_S
    for rank in range(2):
        assert f"rank {rank} of slow has not named its weights" in caplog.text
    assert "gone is not asked for weights" in caplog.text


def test_nodes_get_the_same_fellows_and_sources_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake = FakeRay({"hung"})
    monkeypatch.setattr(rank_lookup, "ray", fake)
    leaders = {f"node-{rank}": (rank, fake.worker("own", f"rank-{rank}")) for rank in (0, 1, 8)}
    earlier = ["gone", "hung", "neighbor", "first", "more than are asked"]
    found = find_copies(leaders, "own", earlier, "space")
    for own, node in enumerate(leaders):
        peers = found[node]
        assert [each.owner for each in peers.fellows] == ["rank-0 of own", "rank-1 of own", "rank-8 of own"]
        assert [each.host for each in peers.fellows] == [f"for {own}"] * 3
        assert peers.own == own
        # The neighbor's copy is that of a node of this replica.
        assert [(each.owner, each.host) for each in peers.earlier] == [("rank-0 of first", f"for {own}")]
    assert "rank 0 of hung has not named its weights" in caplog.text
    assert "gone is not asked for its copy" in caplog.text


def test_nodes_without_a_cache_or_alone_have_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(set())
    monkeypatch.setattr(rank_lookup, "ray", fake)
    two = {f"node-{rank}": (rank, fake.worker("uncached", f"rank-{rank}")) for rank in range(2)}
    assert find_copies(two, "uncached", [], "space") == dict.fromkeys(two, NodePeers())
    one = {"node-0": (0, None)}
    assert find_copies(one, "own", [], "space") == {"node-0": NodePeers()}
