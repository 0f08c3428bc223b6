"""Fixtures of the kernel tests: the device of Triton kernels, and a fixed seed."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch, so that random numbers do not depend on earlier tests."""
    torch.manual_seed(0)


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    """Return the device of Triton kernels: a GPU, or the CPU with Triton's interpreter."""
    pytest.importorskip("triton")
    found: str = request.param
    return found
