"""Ranks that a new scheduler takes over, and those that it starts again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from quire.cluster.fleet.replica import scheduler_start
from quire.proto.replica_status import RankStatus
from quire.worker.rank.actor import RankProcess

STATUS = RankStatus(1, 17, "host", "cpu", "weights")


class FakeRank:
    """The actor of a rank; calls return what `ray.get` would."""

    def __init__(self, process: RankProcess) -> None:
        self.status = SimpleNamespace(remote=lambda: STATUS)
        self.process = SimpleNamespace(remote=lambda: process)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors that were killed; none is one of Ray's."""
    found: list[Any] = []
    monkeypatch.setattr(ray, "get", lambda calls, timeout: calls)
    monkeypatch.setattr(ray, "kill", found.append)
    return found


def test_rank_with_weights_and_cache_is_taken_over(killed: list[Any]) -> None:
    process = RankProcess(17, "host", is_loaded=True)
    assert scheduler_start._ask(1, FakeRank(process)) == (STATUS, process)
    assert killed == []


def test_rank_that_was_being_loaded_counts_as_ended(killed: list[Any]) -> None:
    """The last scheduler has died while it replaced the rank."""
    rank = FakeRank(RankProcess(17, "host"))
    status, process = scheduler_start._ask(1, rank)
    assert (status.stage, process.pid) == ("ended", 0)
    assert killed == [rank]
