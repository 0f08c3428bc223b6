"""A gateway in a process of its own, for tests that kill it.

    python gateway_process.py MODEL_DIR ENDPOINT    prints the HOST:PORT of a gateway of the replica

It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_replica import DEADLINE_S
from version_peer import run_gateway


@contextmanager
def gateway_process(model_dir: Path, endpoint: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a gateway of the replica at `endpoint`; yield its address and its process."""
    arguments = Path(__file__), str(model_dir), endpoint
    with peer_process(os.pathsep.join(sys.path), *arguments) as (address, process):
        yield address, process


@contextmanager
def peer_process(path: str, program: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a program that prints its address and ends with its stdin; yield its address and its process.

    Args:
        path: its PYTHONPATH.
    """
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, f"{program.name} ended"
        yield address, process
    finally:
        process.stdin.close()
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.stdout.close()


if __name__ == "__main__":
    asyncio.run(run_gateway(Path(sys.argv[1]), sys.argv[2]))
