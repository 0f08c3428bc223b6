"""Peers that are asked for weights answer within one deadline, however many there are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.fleet.replica import rank_lookup
from quire.cluster.fleet.replica.rank_lookup import find_weights
from quire.worker import WeightSource


@dataclass(frozen=True)
class _Call:
    replica_id: str
    role: str


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
        call = _Call(replica_id, role)
        return SimpleNamespace(weight_source=SimpleNamespace(remote=lambda replica_id, over_network: call))

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        late = [each for each in calls if each.replica_id in self.hung]
        self.waited_s += timeout if late else 0.0
        return [each for each in calls if each not in late], late

    def get(self, call: Any) -> WeightSource:
        return WeightSource(f"{call.role} of {call.replica_id}", ())


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
