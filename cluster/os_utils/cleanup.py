"""Cleanup process: kills what its owner started and removes the owner's files after the owner has ended.

An owner that is killed cleans nothing up: its sockets and logs stay, and Ray's agents run for minutes.
`python -m quire.cluster.os_utils.cleanup DIRECTORY` reads pids from its standard input, one per line, until the owner
closes the input or dies. It then waits for the processes that descended from each pid when it read the pid, kills
those that have not ended by themselves, and removes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .processes import ProcessTree

# The path of a Unix socket has at most 107 bytes, of which Ray's longest takes 65 below this directory.
_MAX_PARENT_BYTES = 107 - 65 - len("/quire-12345678")
_GRACE_S = 2.0
_EXIT_TIMEOUT_S = 5.0


class PrivateDirectory:
    """A directory that only this user may enter, with a cleanup process. Its path is short enough for sockets."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="quire-", dir=_short_parent()))
        # In a session of its own, so that Ctrl-C does not reach it.
        self._cleanup = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill_on_exit(self, pids: Iterable[int]) -> None:
        """Have these processes and their present descendants killed after this process ends."""
        assert self._cleanup.stdin is not None
        self._cleanup.stdin.write("".join(f"{pid}\n" for pid in pids).encode())
        self._cleanup.stdin.flush()

    def remove(self) -> None:
        """Remove the directory and end the processes given to `kill_on_exit`. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._cleanup.stdin is not None
        self._cleanup.stdin.close()
        self._cleanup.wait(_GRACE_S + 2 * _EXIT_TIMEOUT_S)


def _short_parent() -> str:
    """Return the usual folder for temporary files, or /tmp if its path is too long for sockets."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MAX_PARENT_BYTES else "/tmp"


def main(directory: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to the owner's processes as well
    trees = [ProcessTree([int(line)]) for line in sys.stdin]
    remaining = [tree for tree in trees if tree.wait(_GRACE_S)]
    for tree in remaining:
        tree.kill()
        tree.wait(_EXIT_TIMEOUT_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
