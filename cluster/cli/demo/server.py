"""`quire serve` or `quire fleet` as a child process, with a check for leftovers after it has ended."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ....proto.errors import ReplicaUnavailable
from ...os_utils.closing import Closing
from ...os_utils.processes import ProcessTree

SERVES_HTTP = "quire serves HTTP on "
READY = "quire is ready on "
# Of what hangs: on a machine with a load of 30, Ray's processes take a minute to end.
_STOP_TIMEOUT_S = 180.0
_EXIT_TIMEOUT_S = 60.0
_SHARED_MEMORY = "/dev/shm/"


class ServerProcess(Closing):
    """`quire serve` or `quire fleet` in a session of its own.

    Ctrl-C reaches only the parent, which stops the server cleanly.

    Args:
        arguments: the arguments of the command; the server listens on a loopback port that the system chooses.
        command: ``serve``, or ``fleet``.

    Attributes:
        address: ``HOST:PORT`` of the gRPC server; empty until it is ready.
        http_url: address of the HTTP server; empty until it is ready.
        temporary: the server's folder for temporary files.
    """

    def __init__(self, *arguments: str, command: str = "serve") -> None:
        self.address = self.http_url = ""
        self._folder = tempfile.TemporaryDirectory(prefix="q")
        self.temporary = Path(self._folder.name)
        self._log = self.temporary / "log"
        self._shared_memory: set[Path] = set()  # mapped by the server's processes when last looked at
        self._trees: list[ProcessTree] = []
        program = [sys.executable, "-c", "from quire.cluster.cli import main; main()"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, command, *arguments, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """The server's stderr so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until a token has come through all ranks and return the gRPC server's address.

        Raises:
            ReplicaUnavailable: the server was not ready in time or ended; then with the last line of its log.
        """
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise ReplicaUnavailable(f"the server was not ready in {timeout_s:g} s")
        line = self.process.stdout.readline().decode()
        if line.startswith(SERVES_HTTP):
            self.http_url = line.removeprefix(SERVES_HTTP).strip()
            line = self.process.stdout.readline().decode()  # is printed together with the first line
        if not line.startswith(READY):
            status = self.process.wait(max(0.0, deadline - time.monotonic()))
            last = self.log.strip().rpartition("\n")[2]
            raise ReplicaUnavailable(f"the server ended with exit status {status}: {last}")
        self.address = line.removeprefix(READY).strip()
        self._record_processes()
        return self.address

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S, *, to_group: bool = False) -> int:
        """Send SIGTERM, kill the server if the timeout passes, and return its exit status. Safe to call twice.

        Args:
            to_group: send it to the server's process group, as systemd and `timeout` do.
        """
        if self.process.poll() is None:
            self._record_processes()
            send = os.killpg if to_group else os.kill
            send(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(_EXIT_TIMEOUT_S)

    def leftovers(self, timeout_s: float = _EXIT_TIMEOUT_S) -> list[str]:
        """Describe the processes, files, shared memory and socket that are left after the server has ended.

        Waits up to `timeout_s` for processes that are still ending.
        """
        deadline = time.monotonic() + timeout_s
        pids = {pid for tree in self._trees for pid in tree.wait(max(0.0, deadline - time.monotonic()))}
        left = [f"process {pid}" for pid in sorted(pids)]
        left += [f"file {path}" for path in sorted(self.temporary.glob("quire-*"))]
        left += [f"shared memory {path.name}" for path in sorted(self._shared_memory) if path.exists()]
        if self.address and _is_listening(self.address):
            left.append(f"socket {self.address}")
        return left

    def close(self) -> None:
        """Stop the server if it runs, kill every process that it started, and delete its temporary folder."""
        self.stop()
        for tree in self._trees:
            tree.kill()
            tree.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._folder.cleanup()

    def _record_processes(self) -> None:
        tree = ProcessTree([self.process.pid])
        self._trees.append(tree)
        self._shared_memory |= shared_memory_of(tree.wait(0.0))


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the named shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # the process has just ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line[line.find("/") :]
                if path.startswith(_SHARED_MEMORY) and not path.endswith(" (deleted)"):
                    found.add(Path(path))
    return found


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
