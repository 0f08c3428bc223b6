"""GPUs as NVIDIA's driver reports them, through its management library (NVML): within milliseconds, without torch."""

from __future__ import annotations

import ctypes
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
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def gpu_driver() -> GpuDriver | None:
    """Return the driver of this machine; None if it has none that works."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
        _check(nvml.nvmlInit_v2())
    except (OSError, AttributeError):
        return None
    try:
        return GpuDriver(_driver_version(nvml), _cuda_version(nvml), _gpus(nvml))
    except (OSError, AttributeError):
        return None
    finally:
        nvml.nvmlShutdown()


def _driver_version(nvml: Any) -> str:
    text = ctypes.create_string_buffer(_MAX_TEXT)
    _check(nvml.nvmlSystemGetDriverVersion(text, _MAX_TEXT))
    return text.value.decode()


def _cuda_version(nvml: Any) -> tuple[int, int]:
    number = ctypes.c_int()
    _check(nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)))
    return number.value // 1000, number.value % 1000 // 10


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    return tuple(_gpu(nvml, index) for index in range(count.value))


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
