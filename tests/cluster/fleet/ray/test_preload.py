"""The modules that idle processes of Ray import."""

from __future__ import annotations

import json
import subprocess
import sys

from quire.cluster.fleet.ray.local_cluster import PRELOADED_MODULE
from quire.scheduler.service.actor import SchedulerActor
from quire.worker.rank.actor import WorkerActor

# Ray ignores modules that it cannot import, so only a process of its own shows that they can be.
IMPORT = """
import gc, importlib, json, sys
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
importlib.import_module(sys.argv[1])
print(json.dumps([sorted(sys.modules), len(full), gc.isenabled(), gc.get_freeze_count()]))
"""


def test_preload_imports_the_actors_and_torch_without_a_full_collection() -> None:
    command = [sys.executable, "-c", IMPORT, PRELOADED_MODULE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    modules, num_full, is_enabled, num_frozen = json.loads(done.stdout.splitlines()[-1])
    assert {WorkerActor.__module__, SchedulerActor.__module__, "torch"} <= set(modules)
    assert num_full == 0
    assert is_enabled
    assert num_frozen > 10_000
