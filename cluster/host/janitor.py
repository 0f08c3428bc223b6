"""Janitor: a small process that outlives its owner just long enough to end what the owner started and forgot.

An owner that is killed outright cleans nothing up: sockets and logs stay, and Ray's agents go on for minutes.
`python -m quire.cluster.host.janitor DIRECTORY` reads pids from its standard input, one a line. The end of the input
comes when the owner closes it or dies. Then the processes that descended from those pids when they were named
are killed unless they end by themselves, and the directory is removed.
"""

from __future__ import annotations

import os
import shutil
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
    """A directory that only this user may enter, with a janitor. Sockets live in it, so its path is short."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="quire-", dir=_short_parent()))
        # In a session of its own, so that Ctrl-C does not reach it.
        self._janitor = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def guard(self, pids: Iterable[int]) -> None:
        """Has the janitor end these processes and those that descend from them now, once this process is gone."""
        assert self._janitor.stdin is not None
        self._janitor.stdin.write("".join(f"{pid}\n" for pid in pids).encode())
        self._janitor.stdin.flush()

    def remove(self) -> None:
        """Removes it and ends what is guarded. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait(_GRACE_S + 2 * _EXIT_TIMEOUT_S)


def _short_parent() -> str:
    """The usual place for temporary files, or a shorter one where that leaves sockets no room for their names."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MAX_PARENT_BYTES else "/tmp"


def main(directory: str) -> None:
    trees = [ProcessTree([int(line)]) for line in sys.stdin]
    left = [tree for tree in trees if tree.wait(_GRACE_S)]
    for tree in left:
        tree.kill()
        tree.wait(_EXIT_TIMEOUT_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
