"""Arrays of one transfer arrive unchanged and aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.worker.memory.host_to_device import pack, to_device_together, unpack

Together = Callable[[list[np.ndarray[Any, Any]]], list[Tensor]]


@pytest.fixture(params=["copied", "packed"])
def together(request: pytest.FixtureRequest) -> Together:
    """The path for a CPU, and the one for other devices."""
    if request.param == "copied":
        return lambda arrays: to_device_together(arrays, torch.device("cpu"))
    return lambda arrays: unpack(pack(arrays), arrays)


def test_arrays_of_every_dtype_and_length_arrive_unchanged(together: Together) -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([True, False, True]),
        np.zeros(0, dtype=np.float64),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
        np.zeros((0, 7), dtype=np.int32),
        np.linspace(0, 1, 3, dtype=np.float32),
        np.array([2.0]),
    ]
    given = [array.copy() for array in arrays]
    sent = together(arrays)
    for array in arrays:
        array[...] = 0
    for tensor, array in zip(sent, given, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
    assert len({tensor.data_ptr() % 16 for tensor in sent if tensor.numel()}) == 1


def test_no_arrays_give_no_tensors(together: Together) -> None:
    assert together([]) == []
