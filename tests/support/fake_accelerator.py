"""The current device of each thread, as CUDA keeps it, without a GPU."""

from __future__ import annotations

import threading

import pytest
import torch


class _CurrentDevice(threading.local):
    index = 0


_current = _CurrentDevice()


class _DeviceIndex:
    """Stands in for torch.accelerator.device_index."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._previous, _current.index = _current.index, self._index

    def __exit__(self, *_: object) -> None:
        _current.index = self._previous


def current_device_index() -> int:
    """Return the current device of this thread: 0 unless it was set on this thread."""
    return _current.index


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.accelerator set the current device of the calling thread only."""
    monkeypatch.setattr(torch.accelerator, "device_index", _DeviceIndex)
    monkeypatch.setattr(torch.accelerator, "current_device_index", current_device_index)
