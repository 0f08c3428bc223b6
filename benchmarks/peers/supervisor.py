"""Runs an engine for a parent process and kills all of its processes when the parent is gone.

    python supervisor.py FD COMMAND...

FD is the read end of a pipe whose write end only the parent holds. When it reaches end of file, because the parent
closed it or died, the supervisor resumes the engine's processes, which may be stopped, and gives the engine
END_TIMEOUT_S to exit by itself (its stdin has reached end of file, too). A byte in the pipe skips that. Then, or when
the engine has exited, the remaining processes are killed. As a child subreaper (prctl(2)) the supervisor becomes the
parent of every orphan among them, so it also finds those that started a session of their own. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

END_TIMEOUT_S = 20.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor_pid = os.getpid()

    def die_with_supervisor() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor_pid:  # the supervisor died before the call above
            os._exit(1)

    engine = subprocess.Popen(command, preexec_fn=die_with_supervisor)
    ended = os.pidfd_open(engine.pid)
    ready, _, _ = select.select([pipe, ended], [], [])
    if pipe in ready and not os.read(pipe, 1):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.resume()
        select.select([ended], [], [], END_TIMEOUT_S)
    _kill_all()


def _kill_all() -> None:
    """Kill descendants until this process has none left."""
    with suppress(ChildProcessError):
        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            os.wait()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
