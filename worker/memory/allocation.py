"""Allocations that fail, as ConfigError, and memory that is no longer used."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...kernels.workspace import free_workspaces
from ...proto.errors import ConfigError
from .host_memory import available_bytes

# In messages of torch on a CPU, of CUDA for pinned memory, and of the system for pages.
_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")


def check_host_memory(num_bytes: int, failure: str) -> None:
    """Raise ConfigError if this host does not have the memory.

    An overcommitting system grants the allocation all the same, and kills the process when it touches the pages.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise ConfigError(
            f"{failure}: this host has {available / 2**30:.2f} GiB left; lower kv_cache_memory, num_kv_blocks or "
            "num_host_kv_blocks"
        )


@contextmanager
def out_of_memory_as(failure: str) -> Iterator[None]:
    """Convert an out-of-memory error of the body to a ConfigError with the message `failure`."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if is_known or any(message in str(error).lower() for message in _OUT_OF_MEMORY):
            raise ConfigError(failure) from error
        raise


def free_unused_memory(device: torch.device) -> None:
    """Return the memory of freed tensors and the kernels' workspaces to the device, or on a CPU to the system."""
    free_workspaces(device)
    gc.collect()  # modules of a model refer to each other
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only
    if trim is not None:
        trim(0)
