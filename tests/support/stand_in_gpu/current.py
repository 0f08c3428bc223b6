"""The stand-in GPU that is installed, for what stands in for torch's streams, events, graphs and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gpu import StandInGpu

# Set by `installation.installed`.
gpu: StandInGpu | None = None


def current_gpu() -> StandInGpu:
    """Return the installed device."""
    assert gpu is not None, "the stand-in GPU is not installed any more"
    return gpu


def is_installed() -> bool:
    """Return whether a device is installed."""
    return gpu is not None
