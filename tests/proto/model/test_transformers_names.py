"""The import of transformers."""

from __future__ import annotations

import subprocess
import sys

from deadlines import PROGRAM_TIMEOUT_S

# Without the lock, two of three runs failed: "cannot import name 'AutoConfig'".
IMPORT_IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from quire.proto.model.transformers_spec import import_transformers

barrier = Barrier(4)

def find():
    barrier.wait()
    return import_transformers().AutoConfig

with ThreadPoolExecutor(4) as threads:
    assert len({future.result() for future in [threads.submit(find) for _ in range(4)]}) == 1
"""


def test_transformers_is_imported_by_several_threads_at_once() -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", IMPORT_IN_THREADS], check=True, timeout=PROGRAM_TIMEOUT_S)
