"""Memory of GPUs, from a stand-in for NVIDIA's library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from quire.cluster.config import nvml

SIZES = [80 << 30, 24 << 30, 40 << 30]


class FakeLibrary:
    """Three GPUs; the second one has a UUID."""

    is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(SIZES)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0 if index < len(SIZES) else 2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if uuid == b"GPU-abc" else 2

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = SIZES[handle.value - 1]
        return 0


@pytest.mark.parametrize(
    ("visible", "smallest"),
    [
        (None, 24 << 30),
        ("0,2", 40 << 30),
        ("0, GPU-abc", 24 << 30),
        ("0,7", 0),
        ("MIG-unknown", 0),
        ("", 0),
    ],
)
def test_smallest_gpu_is_one_of_the_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, smallest: int
) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.smallest_gpu_bytes() == smallest
    assert not library.is_open


def test_machine_without_the_library_has_no_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert nvml.smallest_gpu_bytes() == 0
