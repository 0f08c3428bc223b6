"""Memory of GPUs from NVIDIA's management library, which, unlike CUDA, leaves no context on the GPU.

A process that only starts the ranks must not initialize CUDA: a context takes half a gigabyte of the first GPU, and
processes forked afterwards cannot use CUDA.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def smallest_gpu_bytes() -> int:
    """Return the memory of the smallest GPU among those of CUDA_VISIBLE_DEVICES, all by default.

    Returns 0 if there is none, and if the library is not there, as on GPUs of other vendors.
    """
    try:
        library: Any = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    if library.nvmlInit_v2():
        return 0
    try:
        return min(_sizes(library), default=0)
    finally:
        library.nvmlShutdown()


def _sizes(library: Any) -> Iterator[int]:
    """Yield the bytes of each visible GPU; 0 for one that the library does not know."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        visible = ",".join(map(str, range(count.value)))
    for name in filter(None, map(str.strip, visible.split(","))):
        handle, memory = ctypes.c_void_p(), _Memory()
        found = (
            library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
            if name.isdecimal()
            else library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        )
        if found or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            yield 0
        else:
            yield int(memory.total)
