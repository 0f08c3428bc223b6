"""Conversion of failed allocations to ConfigError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
