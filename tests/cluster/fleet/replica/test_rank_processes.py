"""Ends of ranks are described by their process and by that of their Ray node."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exit_status import KILLED
from ray.exceptions import RayActorError

from quire.cluster.fleet.ray.errors import describe, full_disk
from quire.cluster.fleet.replica.rank_processes import Rank
from quire.proto.replica_status import RankStatus
from quire.worker.rank.actor import RankProcess

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
PRINT_AND_SLEEP = """
import sys, time
print("first\\n\\nno memory  for 5 blocks", file=sys.stderr)
print("printed", flush=True)
time.sleep(600)
"""
STATUS = RankStatus(0, 11, "10.0.0.5", "cpu", "idle")


@pytest.fixture
def processes() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """A rank's process, and one that stands for its raylet."""
    with subprocess.Popen(SLEEP) as rank, subprocess.Popen(SLEEP) as raylet:
        yield rank, raylet
        for process in (rank, raylet):
            process.kill()


Processes = tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]


def watched(processes: Processes) -> Rank:
    rank, raylet = processes
    return Rank(None, STATUS, RankProcess(rank.pid, socket.gethostname(), "", raylet.pid))


def test_end_after_that_of_the_raylet_names_the_node(processes: Processes) -> None:
    rank = watched(processes)
    for process in reversed(processes):
        process.kill()
        process.wait()
    assert rank.has_ended
    assert f"after its Ray node on 10.0.0.5 (raylet pid {processes[1].pid}) had died" in rank.describe_end()
    rank.kill()


def test_rank_that_outlives_its_raylet_is_no_dead_one(processes: Processes) -> None:
    rank = watched(processes)
    assert rank.lost_raylet == ""
    processes[1].kill()
    processes[1].wait()
    assert rank.lost_raylet == f"its Ray node on 10.0.0.5 (raylet pid {processes[1].pid})"
    before = rank.outlives_raylet
    processes[0].kill()
    processes[0].wait()
    assert (before, rank.outlives_raylet) == (True, False)
    rank.kill()


def test_end_of_a_rank_alone_does_not_name_the_node(processes: Processes) -> None:
    rank = watched(processes)
    processes[0].kill()
    processes[0].wait()
    assert rank.has_ended
    assert "raylet" not in rank.describe_end()
    rank.kill()


def test_end_of_a_rank_names_the_signal_and_the_end_of_its_stderr(tmp_path: Path) -> None:
    stderr = tmp_path / "worker.err"
    with (
        stderr.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-S", "-c", PRINT_AND_SLEEP], stdout=subprocess.PIPE, stderr=file
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"printed\n"
        rank = Rank(None, STATUS, RankProcess(process.pid, socket.gethostname(), str(stderr)))
        process.kill()
        process.wait()
    assert rank.describe_end() == f"{KILLED}; last lines of its stderr: first | no memory for 5 blocks"
    rank.kill()


def test_actor_that_died_with_its_node_is_described_with_the_node() -> None:
    lost = RayActorError(
        error_msg="The actor died because its node has died. Node Id: 0a1b2c\n\tthe node was terminated unexpectedly"
    )
    assert describe(lost) == "its process died with its Ray node 0a1b2c"
    assert describe(RayActorError(error_msg="The actor is dead")) == "its process died"


def test_end_on_a_full_disk_is_described_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker.err"
    assert full_disk(log) == ""  # no file, as a terminal
    log.touch()
    assert full_disk(log) == ""
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert full_disk(log) == f"; the disk of {tmp_path} is full, and Ray starts no process without its logs"
