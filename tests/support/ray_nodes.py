"""RayNodes: Ray nodes on this machine, each a `ray start --block` process that is ended by its pid."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadlines import READY_TIMEOUT_S

from quire.cluster.fleet.ray.local_cluster import _TOKEN
from quire.cluster.os_utils.closing import Closing
from quire.cluster.os_utils.processes import ProcessTree

LOOPBACK = "127.0.0.1"
_MAX_STARTS = 3
_END_TIMEOUT_S = 20.0


class RayNodes(Closing):
    """A head node and nodes that join it, each with a raylet of its own.

    They use the token of this process's private clusters, because Ray's library keeps the first token that it reads.

    Args:
        resources: of the head node: ``CPU`` and others.
        ip: of the head node.
        labels: of the head node.

    Attributes:
        address: of the head node, for `attach` and RAY_ADDRESS.
    """

    def __init__(
        self, resources: Mapping[str, float], ip: str = LOOPBACK, labels: Mapping[str, str] | None = None
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="qrn-", dir="/tmp"))  # short: Unix sockets live in it
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wrapped: list[
            subprocess.Popen[bytes]
        ] = []  # started by prefix commands that do not forward signals
        self.address = ""
        labeled = [f"--labels={name}={value}" for name, value in (labels or {}).items()]
        try:
            for _ in range(_MAX_STARTS):
                port = _free_port(ip)
                head = self._start(["--head", *self._head_options(ip, port), *labeled], resources, ip)
                if self._listens(head, ip, port):
                    self.address = f"{ip}:{port}"
                    return
                self._processes.remove(head)
            raise AssertionError("the head node did not start: " + self._log_of(0).read_text())
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Environment of processes that join the cluster."""
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
        return os.environ | own

    @property
    def head_pid(self) -> int:
        return self._processes[0].pid

    def add(
        self, resources: Mapping[str, float], ip: str = LOOPBACK, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start another node, and return before it has joined. `prefix` is put before its command."""
        process = self._start([f"--address={self.address}"], resources, ip, prefix)
        if prefix:
            self._wrapped.append(process)
        return process

    def close(self) -> None:
        """End all nodes, the latest first. Safe to call twice."""
        for process in reversed(self._processes):
            tree = ProcessTree([process.pid])
            (tree.kill if process in self._wrapped else process.terminate)()
            if tree.wait(_END_TIMEOUT_S):
                tree.kill()
                tree.wait(_END_TIMEOUT_S)
            tree.close()
            process.wait()
        self._processes = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _head_options(self, ip: str, port: int) -> list[str]:
        return [
            f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._directory}/r",
            f"--ray-client-server-port={_free_port(ip)}",
        ]  # fmt: skip

    def _start(
        self, how: Sequence[str], resources: Mapping[str, float], ip: str, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        command = [
            *prefix, str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats", *how,
            f"--node-ip-address={ip}", f"--num-cpus={resources['CPU']:g}", f"--num-gpus={resources.get('GPU', 0):g}",
            "--resources=" + str(others).replace("'", '"'), "--object-store-memory=80000000",
            "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
        ]  # fmt: skip
        with self._log_of(len(self._processes)).open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.append(process)
        return process

    def _log_of(self, number: int) -> Path:
        return self._directory / f"node-{number}.log"

    def _listens(self, head: subprocess.Popen[bytes], ip: str, port: int) -> bool:
        """Wait until the head node listens. Returns False if it ended: another process may have taken its port."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while head.poll() is None:
            try:
                socket.create_connection((ip, port), timeout=1).close()
                return head.poll() is None
            except OSError:
                assert time.monotonic() < deadline, (
                    "the head node did not start: " + self._log_of(0).read_text()
                )
                time.sleep(0.1)
        return False


def _free_port(ip: str) -> int:
    with socket.create_server((ip, 0)) as server:
        port: int = server.getsockname()[1]
    return port
