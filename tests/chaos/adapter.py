"""The LoRA adapter of the demo model that servers of chaos have."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from adapters import write_adapter

from quire.cluster.config.engine_options import DEMO_MODEL_PATH

from .jobs import ADAPTER


def adapter_options(stack: ExitStack) -> tuple[str, ...]:
    """Write an adapter that is there until the stack closes; return the options of a server that has it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return "--enable-lora", "--lora-modules", f"{ADAPTER}={write_adapter(folder / ADAPTER, DEMO_MODEL_PATH)}"


def adapter_path(options: tuple[str, ...]) -> str:
    """Return the directory of the adapter of `adapter_options`."""
    return options[-1].removeprefix(f"{ADAPTER}=")
