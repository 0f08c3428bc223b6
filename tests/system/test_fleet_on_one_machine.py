"""`quire fleet --local`: a fleet with TLS and tokens on this machine, by one command."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import READY_TIMEOUT_S

from quire import Client
from quire.cluster.cli.demo.server import ServerProcess

pytestmark = pytest.mark.cluster

RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_fleet_of_one_command_serves_recovers_and_ends(tmp_path: Path, run_quire: RunQuire) -> None:
    folder = tmp_path / "credentials"
    options = ("--folder", str(folder), "--num-kv-blocks", "64")
    server = ServerProcess("demo", "--local", "2", *options, command="fleet")
    try:
        server.wait_ready(READY_TIMEOUT_S)
        assert server.process.stdout is not None
        status, generate = (shlex.split(server.process.stdout.readline().decode()) for _ in range(2))
        refused = run_quire("generate", "Hello", "--target", server.address)
        assert refused.returncode == 1, refused.stdout
        assert run_quire(*generate[1:], "--max-tokens", "4").returncode == 0
        shown = run_quire(*status[1:])
        assert shown.returncode == 0, shown.stderr

        token = (folder / "operator.token").read_text().strip()
        with Client(server.address, tls_ca=str(folder / "tls.crt"), token=token) as operator:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while len(ready := [each for each in operator.fleet().replicas if each.ready]) < 2:
                assert time.monotonic() < deadline, operator.fleet()
                time.sleep(0.2)
            os.kill(ready[0].ranks[0].pid, signal.SIGKILL)
        assert run_quire(*generate[1:], "--max-tokens", "4").returncode == 0
        assert server.stop() == 0, server.log
        assert server.leftovers() == []
    finally:
        server.close()
