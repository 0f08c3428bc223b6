"""The device of the tests of Triton kernels, and the same random numbers in every run."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE


@pytest.fixture(autouse=True)
def seed() -> None:
    """Numbers that tests draw do not depend on the tests before them."""
    torch.manual_seed(0)


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run in these tests: the same tests in the interpreter and on a GPU."""
    pytest.importorskip("triton")
    found: str = request.param
    return found
