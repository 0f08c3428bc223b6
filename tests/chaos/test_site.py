"""Resources of servers under chaos: processes that Ray keeps for later actors are not counted."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.chaos.site import Resources, command_of

SLEEP = "-S", "-c", "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("name", "num_counted"),
    [("ray::IDLE", 0), ("default_worker.py", 0), ("ray::WorkerActor.run", 1), ("python -m quire", 1)],
)
def test_processes_are_counted_unless_they_are_spare(name: str, num_counted: int) -> None:
    with subprocess.Popen([name, *SLEEP], executable=sys.executable) as child:
        try:
            process = psutil.Process(child.pid)
            while not command_of(process).startswith(name):
                assert child.poll() is None
            assert Resources.of([], [process]).num_processes == num_counted
        finally:
            child.kill()
