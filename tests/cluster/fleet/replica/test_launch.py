"""Decisions of a launch, with fakes in place of the processes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import small_config

from quire.cluster.fleet.replica import launch as module
from quire.proto.config import EngineConfig
from quire.proto.replica_status import RankStatus
from quire.worker.rank.actor import LoadReport


class Launch:
    """A launch whose ranks report the given numbers of blocks."""

    scheduler = starter = None

    def __init__(self, *num_blocks: int) -> None:
        self.allocated: list[int | None] = []
        self._num_blocks = list(num_blocks)
        self._reports = [
            LoadReport(RankStatus(rank, 1, "here", "cpu", "idle"), {"weights": 1.0})
            for rank in range(len(num_blocks))
        ]

    def place(self) -> None: ...

    def start_processes(self) -> None: ...

    def report(self, *_: object) -> None: ...

    def load(self) -> list[LoadReport]:
        return self._reports

    def profile(self) -> list[int]:
        return self._num_blocks

    def fetch_model(self) -> None:
        pass

    def allocate(self, config: EngineConfig) -> EngineConfig:
        self.allocated.append(config.cache.num_kv_blocks)
        return config

    def log_ranks(self) -> None: ...

    def log_seconds(self, stages: Mapping[str, float]) -> None:
        assert list(stages)[-1] == "connect"

    def connect(self, config: EngineConfig, reports: list[LoadReport]) -> str:
        assert reports == self._reports
        return "ipc:///nowhere"

    def record(self, config: EngineConfig, endpoint: str, version: str) -> EngineConfig:
        return config


@pytest.mark.parametrize("num_blocks", [(30,), (31, 12, 40), (7, 7)])
def test_every_rank_gets_the_smallest_number_of_blocks_of_all(
    num_blocks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(*num_blocks)
    monkeypatch.setattr(module, "_Launch", lambda *_: launch)
    monkeypatch.setattr(module, "Replica", lambda record, *_: record)
    target: Any = SimpleNamespace(on_processes_started=lambda: None, namespace="none", is_detached=True)
    started: Any = module.launch_replica(small_config(num_blocks=99), "replica-1", target)
    assert launch.allocated == [min(num_blocks)]
    assert started.cache.num_kv_blocks == min(num_blocks)
