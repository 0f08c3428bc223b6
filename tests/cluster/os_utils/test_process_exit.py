"""The exit of a process that is no child of this one is described, with the end of its stderr."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from exit_status import KILLED

from quire.cluster.os_utils.process_exit import MAX_STDERR_LINES, ProcessExit, describe_status, last_lines

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_signal_of_a_killed_process_is_named() -> None:
    child = subprocess.Popen(SLEEP)
    with closing(ProcessExit(child.pid)) as process:
        had_ended = process.has_ended
        process.kill()
        child.wait()
        assert (had_ended, process.has_ended) == (False, True)
        assert process.describe() == KILLED


def test_stopped_process_is_told_from_a_running_one() -> None:
    child = subprocess.Popen(SLEEP)
    with closing(ProcessExit(child.pid)) as process:
        was_stopped = process.is_stopped
        child.send_signal(signal.SIGSTOP)
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            pass
        assert (was_stopped, process.is_stopped) == (False, True)
        process.kill()
        child.wait()


def test_process_that_has_ended_cannot_be_watched() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError):
        ProcessExit(child.pid)


def test_statuses_in_words() -> None:
    assert describe_status(3 << 8) == "its process exited with code 3"
    assert describe_status(signal.SIGSEGV) == "its process was killed by SIGSEGV"


def test_last_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    path.write_text("first\n\n" + "".join(f"line   {number}\n" for number in range(MAX_STDERR_LINES)))
    assert last_lines(str(path)) == " | ".join(f"line {number}" for number in range(MAX_STDERR_LINES))
    assert last_lines(str(tmp_path / "missing")) == ""


def test_last_lines_have_none_of_rays_markers(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    path.write_text(":job_id:01000000\n:actor_name:RankActor\nCUDA error: out of memory\n")
    assert last_lines(str(path)) == "CUDA error: out of memory"
