"""A test run finds and kills the processes that its tests leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from left_processes import VARIABLE, kill_left


def test_process_that_left_its_session_is_killed() -> None:
    command = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
    environment = os.environ | {VARIABLE: "of-this-test"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert kill_left("of-this-test", 0.0)[0].startswith(f"{process.pid}: ")
        assert process.wait(60) == -signal.SIGKILL
    assert kill_left("of-this-test") == []
