"""A test run ends the processes that its tests leave, also if the run is killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import run_children

# Starts a process that escapes its parent's session, prints the pids of both, and ends the run or waits to be killed.
RUN = """
import subprocess, sys, time
from run_children import end_run, start_run
guard = start_run(0.2)
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print(left.pid, flush=True)
if "end" in sys.argv:
    print(*end_run(guard, 0.2), flush=True)
else:
    time.sleep(100)
"""


@pytest.mark.parametrize("how", ["end", "kill"])
def test_run_ends_the_processes_that_it_left(how: str) -> None:
    support = str(Path(run_children.__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([support, *sys.path])}
    del environment[run_children.VARIABLE]
    command = [sys.executable, "-c", RUN, how]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        pidfd = os.pidfd_open(pid)
        if how == "end":
            assert run.stdout.read().startswith(f"{pid}: ")
        else:
            run.kill()
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
