"""The device of the tests of Triton kernels."""

from __future__ import annotations

import pytest
from triton_device import DEVICE


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run in these tests: the same tests in the interpreter and on a GPU."""
    pytest.importorskip("triton")
    found: str = request.param
    return found
