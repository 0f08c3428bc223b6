"""WorkerProcess: a process that answers one task after the other, and is replaced if it does not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .frames import receive_frame, send_frame

_END_TIMEOUT_S = 5.0


class WorkerProcess:
    """One worker, or the place of one that is not running. Used by one thread at a time.

    Args:
        module: name of the package that is run with `arguments` after the connection's file descriptor.
        descriptors: further file descriptors that the process inherits.

    Attributes:
        was_killed: the last process that ended did so by SIGKILL, and was not killed here.
    """

    def __init__(self, module: str, arguments: Sequence[str], descriptors: Sequence[int] = ()) -> None:
        self._module = module
        self._arguments = tuple(arguments)
        self._descriptors = tuple(descriptors)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.was_killed = False

    def start(self) -> socket.socket:
        """Start the process unless it runs."""
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self._descriptors),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "RAYON_NUM_THREADS": "1",
                },
            )
        self._connection = ours
        return ours

    def run(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the worker's answer; None if the process ended. Raises TimeoutError if the time is over."""
        connection = self.start()
        answer, grace_s = None, _END_TIMEOUT_S
        try:
            send_frame(connection, task, timeout_s)
            answer = receive_frame(connection, timeout_s)
        except TimeoutError:
            grace_s = 0.0
            raise
        except OSError:
            pass
        finally:
            if answer is None:
                self._end(grace_s)
        return answer

    def kill(self) -> None:
        """End the process at once."""
        self._end(grace_s=0.0)

    def _end(self, grace_s: float) -> None:
        """End the process, with some time for one whose connection has ended to end by itself."""
        process, connection = self._process, self._connection
        self._connection = self._process = None
        if process is None or connection is None:
            return
        connection.close()
        try:
            self.was_killed = process.wait(grace_s) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            self.was_killed = False
            process.kill()
            process.wait(_END_TIMEOUT_S)
