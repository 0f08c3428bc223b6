"""Ranks as real Ray actors: each call runs on the rank's own GPU, though not on the constructor's thread."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from quire.cluster.fleet.ray.local_cluster import LocalCluster
from quire.proto.config import EngineConfig, SwapRates
from quire.worker.rank.actor import LoadReport, WorkerActor

pytestmark = pytest.mark.cluster

NUM_RANKS = 2
START_S = 240.0  # as PROGRAM_TIMEOUT_S; the ranks import this file without the tests' own modules
SUPPORT = str(Path(__file__).parent.parent / "support")


class RecordingActor(WorkerActor):
    """A WorkerActor on a machine with a fake accelerator, whose runner records the threads and their devices."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        sys.path.insert(0, SUPPORT)
        import fake_accelerator

        os.environ["TRITON_INTERPRET"] = "1"  # the GPUs cannot be compiled for
        self._current_device_index = fake_accelerator.current_device_index
        fake_accelerator.install(pytest.MonkeyPatch())
        self._constructor_thread = threading.get_ident()
        actor = self

        class Runner:
            stage = "idle"

            def __init__(self, *_: Any, **__: Any) -> None:
                actor._record()

            def num_blocks_that_fit(self) -> int:
                actor._record()
                return 7

            def allocate_cache(self, num_blocks: int) -> SwapRates:
                actor._record()
                return SwapRates()

        self._calls: list[tuple[bool, int]] = []
        super().__init__(config, rank, Runner)

    def _record(self) -> None:
        is_constructor_thread = threading.get_ident() == self._constructor_thread
        self._calls.append((is_constructor_thread, self._current_device_index()))

    def calls(self) -> list[tuple[bool, int]]:
        """Return for each call whether it ran on the constructor's thread, and the current device."""
        return self._calls


def test_ray_actors_use_their_own_gpu_on_every_thread() -> None:
    from fakes import small_config  # the ranks import this module without it

    config = small_config()
    config = replace(config, parallel=replace(config.parallel, device="cuda"))
    with LocalCluster(NUM_RANKS, num_gpus=NUM_RANKS):
        kind = ray.remote(RecordingActor)
        ranks = [
            kind.options(max_concurrency=2, num_gpus=1, num_cpus=0).remote(config, rank)
            for rank in range(NUM_RANKS)
        ]
        reports: list[LoadReport] = ray.get([rank.load.remote(None) for rank in ranks], timeout=START_S)
        ray.get([rank.profile.remote() for rank in ranks], timeout=START_S)
        ray.get([rank.allocate.remote(7) for rank in ranks], timeout=START_S)
        calls = ray.get([rank.calls.remote() for rank in ranks], timeout=START_S)
    ordinals = [int(report.status.device.removeprefix("cuda:")) for report in reports]
    assert sorted(ordinals) == [0, 1]
    assert calls == [[(False, ordinal)] * 3 for ordinal in ordinals]
