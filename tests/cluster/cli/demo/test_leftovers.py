"""Shared memory is reported only for the processes that map it."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from quire.cluster.cli.demo.server import shared_memory_of


def test_shared_memory_of_names_only_what_the_processes_map() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = SharedMemory(create=True, size=4096)
    try:
        path = Path("/dev/shm", memory.name)
        assert path in shared_memory_of([os.getpid(), other.pid])
        assert path not in shared_memory_of([other.pid])
    finally:
        memory.unlink()
    assert path not in shared_memory_of([os.getpid()])  # unlinked: freed once no process maps it
    memory.close()
    other.communicate(b"\n")
    assert shared_memory_of([other.pid]) == set()
