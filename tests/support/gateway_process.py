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
    process = subprocess.Popen(
        [sys.executable, __file__, str(model_dir), endpoint],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the gateway's process ended"
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
