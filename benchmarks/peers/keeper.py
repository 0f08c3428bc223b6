"""Runs an engine for another process, and ends all that the engine has started once that process is gone.

    python keeper.py FD COMMAND...

FD is the reading end of a pipe whose other end only the starter holds. When it closes, because the starter closed it
or died of whatever cause, the engine's processes are continued, in case they are stopped, and the engine may end by
itself (its stdin has ended, too). A byte instead of the end means that there is no time for that. What is left then,
or when the engine has ended, is killed. As a subreaper this process is the parent of every orphan among them, so none
of them gets away, not even into a session of its own. Linux only.
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
    keeper_pid = os.getpid()

    def die_with_keeper() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper_pid:  # it died before the signal was asked for
            os._exit(1)

    engine = subprocess.Popen(command, preexec_fn=die_with_keeper)
    ended = os.pidfd_open(engine.pid)
    ready, _, _ = select.select([pipe, ended], [], [])
    if pipe in ready and not os.read(pipe, 1):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.resume()
        select.select([ended], [], [], END_TIMEOUT_S)
    _kill_all()


def _kill_all() -> None:
    """Returns when this process has no descendant left."""
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
