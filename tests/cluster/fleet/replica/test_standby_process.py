"""StandbyProcess: one process is started in advance, becomes one rank, and is not needed for a recovery."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from quire.cluster.fleet.replica.process_starter import StandbyProcess

DEADLINE_S = 60.0


class Method:
    """A method of a fake actor; `remote` returns what it returns or raises, for the fake `ray.get`."""

    def __init__(self, results: list[Any], calls: list[tuple[Any, ...]]) -> None:
        self._results, self._calls = results, calls

    def remote(self, *arguments: Any) -> Future[Any]:
        self._calls.append(arguments)
        future: Future[Any] = Future()
        result = self._results.pop(0) if self._results else None
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future


class Actor:
    def __init__(self, *failures: Exception) -> None:
        self.places: list[tuple[Any, ...]] = []
        self.process = Method([], [])
        self.take_place = Method(list(failures), self.places)


@dataclass
class Starter:
    """A ProcessStarter whose scheduler, rank 0 and rank 1 are on one node, and rank 2 on another."""

    actors: list[Actor | Exception]
    node_ids: tuple[str, ...] = ("a", "a", "a", "b")
    configs: tuple[str, ...] = ("config 0", "config 1", "config 2")
    num_started: int = field(default=0)

    def start_standby(self) -> Actor:
        self.num_started += 1
        actor = self.actors.pop(0)
        if isinstance(actor, Exception):
            raise actor
        return actor


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    found: list[Actor] = []
    monkeypatch.setattr(ray, "get", lambda future, timeout: future.result(timeout))
    monkeypatch.setattr(ray, "kill", found.append)
    return found


def prepare(standby: StandbyProcess) -> None:
    done = threading.Event()
    standby.prepare(then=done.set)
    assert done.wait(DEADLINE_S)


def make(*actors: Actor | Exception) -> tuple[StandbyProcess, Starter]:
    starter = Starter(list(actors))
    return StandbyProcess(starter), starter  # type: ignore[arg-type]


def test_prepared_process_becomes_one_rank() -> None:
    first, second = Actor(), Actor()
    standby, starter = make(first, second)
    assert standby.take(0) is None
    prepare(standby)
    prepare(standby)
    assert starter.num_started == 1
    assert standby.take(2) is None  # on another node
    assert standby.take(1) is first
    assert first.places == [("config 1", 1)]
    assert standby.take(0) is None
    prepare(standby)
    assert standby.take(0) is second


def test_standby_that_ended_is_not_a_rank(killed: list[Actor]) -> None:
    ended = Actor(RayActorError())
    standby, _ = make(ended)
    prepare(standby)
    assert standby.take(0) is None
    assert killed == [ended]


def test_failed_start_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    actor = Actor()
    standby, _ = make(ValueError("the name is in use"), actor)
    prepare(standby)
    assert "no standby process was started: the name is in use" in caplog.text
    assert standby.take(0) is None
    prepare(standby)
    assert standby.take(0) is actor
