"""What a server is said to have left is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from quire.cluster.demo.server import shared_memory_of


def test_shared_memory_is_told_of_those_who_map_it() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = SharedMemory(create=True, size=4096)
    try:
        path = Path("/dev/shm", memory.name)
        assert path in shared_memory_of([os.getpid(), other.pid])
        assert path not in shared_memory_of([other.pid])
    finally:
        memory.unlink()
    assert path not in shared_memory_of([os.getpid()])  # it has no name any more, and goes with who maps it
    memory.close()
    other.communicate(b"\n")
    assert shared_memory_of([other.pid]) == set()
