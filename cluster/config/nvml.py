"""GPUs as NVIDIA's driver reports them, through its management library (NVML): within milliseconds, without torch.

Unlike CUDA the library leaves no context on the GPU. A process that only starts the ranks must not initialize CUDA: a
context takes half a gigabyte of the first GPU, and processes forked afterwards cannot use CUDA.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_MAX_TEXT = 96


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        capability: CUDA compute capability, for example (9, 0).
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """The driver and its GPUs.

    Attributes:
        cuda: newest CUDA version that the driver supports, for example (12, 8).
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_driver() -> GpuDriver | None:
    """Return the driver of this machine; None if it has none that works."""
    try:
        with _opened() as nvml:
            return GpuDriver(_driver_version(nvml), _cuda_version(nvml), _gpus(nvml))
    except (OSError, AttributeError):
        return None


def smallest_gpu_bytes() -> int:
    """Return the memory of the smallest GPU among those of CUDA_VISIBLE_DEVICES, all by default.

    Returns 0 if there is none, and if the library is not there, as on GPUs of other vendors.
    """
    try:
        with _opened() as nvml:
            return min(_visible_bytes(nvml), default=0)
    except (OSError, AttributeError):
        return 0


@contextmanager
def _opened() -> Iterator[Any]:
    """Yield the library. Raises OSError or AttributeError if there is none that works."""
    nvml = ctypes.CDLL(_LIBRARY)
    _check(nvml.nvmlInit_v2())
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _visible_bytes(nvml: Any) -> Iterator[int]:
    """Yield the bytes of each visible GPU; 0 for one that the library does not know."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(_count(nvml))) if visible is None else visible.split(",")
    for name in filter(None, map(str.strip, names)):
        handle = ctypes.c_void_p()
        found = (
            nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
            if name.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        )
        memory = _Memory()
        is_known = not found and not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        yield int(memory.total) if is_known else 0


def _driver_version(nvml: Any) -> str:
    text = ctypes.create_string_buffer(_MAX_TEXT)
    _check(nvml.nvmlSystemGetDriverVersion(text, _MAX_TEXT))
    return text.value.decode()


def _cuda_version(nvml: Any) -> tuple[int, int]:
    number = ctypes.c_int()
    _check(nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)))
    return number.value // 1000, number.value % 1000 // 10


def _count(nvml: Any) -> int:
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    return count.value


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    return tuple(_gpu(nvml, index) for index in range(_count(nvml)))


def _gpu(nvml: Any, index: int) -> Gpu:
    device, memory = ctypes.c_void_p(), _Memory()
    name = ctypes.create_string_buffer(_MAX_TEXT)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
    _check(nvml.nvmlDeviceGetName(device, name, _MAX_TEXT))
    _check(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
    _check(nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)))
    return Gpu(name.value.decode(), memory.total, (major.value, minor.value))


def _check(status: int) -> None:
    if status:
        raise OSError(f"NVML returned {status}")
