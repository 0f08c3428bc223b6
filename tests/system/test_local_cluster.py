"""LocalCluster: start, retry of a failed start, and removal; attach to a missing cluster."""

import logging
import os
from pathlib import Path

import pytest
import ray

from quire.cluster.fleet.ray.local_cluster import PRELOADED_MODULE, LocalCluster, attach
from quire.proto.errors import ReplicaUnavailable


@pytest.mark.cluster
def test_second_cluster_in_one_process_starts_after_the_first_is_closed() -> None:
    for _ in range(2):
        with LocalCluster(num_cpus=1) as cluster:
            assert ray.is_initialized()
            directory = cluster.directory
        assert not ray.is_initialized()
        assert not directory.exists()


class FailingStart:
    """Fake of ray.init that fails the given number of times, leaving logs as Ray's processes do."""

    def __init__(self, num_failures: int) -> None:
        self.directories: list[Path] = []
        self._num_failures = num_failures

    def __call__(self, *, _temp_dir: str, **options: object) -> None:
        self.directories.append(Path(_temp_dir).parent)
        if len(self.directories) > self._num_failures:
            return
        logs = Path(_temp_dir) / "session_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "gcs_server.out").write_text("")
        (logs / "raylet.err").write_text("first line\n\nthe disk is full\n")
        raise TimeoutError("the node\ndid not start")


@pytest.fixture
def failing_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailingStart:
    start = FailingStart(request.param)
    monkeypatch.setattr(ray, "init", start)
    return start


@pytest.mark.parametrize("failing_start", [1], indirect=True)
def test_start_that_fails_once_is_retried(
    failing_start: FailingStart, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LocalCluster(num_cpus=1) as cluster:
        first, second = failing_start.directories
        assert first != second == cluster.directory
        assert not first.exists()
    assert "the node did not start; raylet.err: first line | the disk is full" in caplog.text


@pytest.mark.parametrize("failing_start", [2], indirect=True)
def test_start_that_fails_twice_raises_with_ray_s_logs_and_leaves_no_files(
    failing_start: FailingStart,
) -> None:
    with pytest.raises(
        ReplicaUnavailable,
        match=r"Ray did not start: the node did not start; raylet.err: .* \| the disk is full",
    ):
        LocalCluster(num_cpus=1)
    assert len(failing_start.directories) == 2
    assert not any(directory.exists() for directory in failing_start.directories)


@pytest.mark.parametrize("failing_start", [0], indirect=True)
def test_pool_of_processes_has_the_imports_of_all_actors(failing_start: FailingStart) -> None:
    with LocalCluster(num_cpus=3):
        variables = dict(os.environ)
    assert variables["RAY_num_workers_soft_limit"] == "3"
    assert variables["RAY_preload_python_modules"] == PRELOADED_MODULE


def test_attach_to_a_missing_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **options: object) -> None:
        raise ConnectionError(f"no answer at {address}")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        ReplicaUnavailable, match=r"no Ray cluster at 127.0.0.1:1 can be joined: no answer at"
    ):
        attach("127.0.0.1:1")
