"""Imports the modules of ranks and schedulers: for the idle processes of Ray that become one.

Modules live as long as the process, so a garbage collection while they are imported finds nothing. Importing torch
causes four full ones, the last of 0.1 s.
"""

from __future__ import annotations

import gc
import importlib

MODULES: tuple[str, ...] = (
    "quire.scheduler.service.actor",
    "quire.worker.rank.actor",
    "quire.worker.rank.runner",
    "quire.worker.comm.shared_memory",
    "quire.worker.comm.torch_distributed",
)


def preload() -> None:
    """Import MODULES without garbage collections, and leave them out of later ones."""
    gc.disable()
    try:
        for name in MODULES:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


preload()
