"""Weights on their way to a stand-in GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton_device
from safetensors.torch import save_file
from stand_in_gpu import DeviceTensor, StandInGpu, installed

from quire.proto.errors import ModelLoadError
from quire.worker.weights import device_writer
from quire.worker.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
assert triton_device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with installed(monkeypatch) as gpu:
        yield gpu


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"matrix": numbers(300, 40), "stack": numbers(3, 50, 20), "vector": numbers(700)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_reads_through_few_buffers_equal_the_file(
    folder: Path, gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes of many parts, in the file's dtype and converted, whole and transposed; copies wait for no one."""
    monkeypatch.setattr(device_writer, "BUFFER_BYTES", 1000)
    monkeypatch.setattr(device_writer, "NUM_READERS", 2)
    checkpoint = Checkpoint(folder)
    checkpoint.alias_rows("rows", "stack", (3, 50, 20), 1, 10, 30)
    checkpoint.alias_transpose("matrix.t", (300, 40))
    found = {
        "matrix": torch.empty(300, 40, device="cuda"),
        "columns": torch.empty(300, 7, dtype=torch.float64, device="cuda"),
        "rows": torch.empty(30, 20, device="cuda"),
        "vector": torch.empty(600, device="cuda"),
    }
    checkpoint.read_into(found["matrix"], "matrix", (300, 40))
    checkpoint.read_into(found["columns"], "matrix", (300, 40), 1, 5)
    checkpoint.read_into(found["rows"], "rows", (30, 20))
    checkpoint.read_into(found["vector"], "vector", (700,), 0, 50)
    read = checkpoint.read("matrix", (300, 40), (17, 90), device=torch.device("cuda", 0))
    assert set(gpu.num_syncs) <= {"event.synchronize"}
    checkpoint.close()
    assert isinstance(read, DeviceTensor)
    assert torch.equal(found["matrix"].cpu(), numbers(300, 40))
    assert torch.equal(found["columns"].cpu(), numbers(300, 40)[:, 5:12].double())
    assert torch.equal(found["rows"].cpu(), numbers(3, 50, 20)[1, 10:40])
    assert torch.equal(found["vector"].cpu(), numbers(700)[50:650])
    assert torch.equal(read.cpu(), numbers(300, 40)[17:107])


def test_rows_longer_than_a_buffer_are_read_without_it(
    folder: Path, gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_writer, "BUFFER_BYTES", 100)
    checkpoint = Checkpoint(folder)
    out = torch.empty(300, 40, device="cuda")
    checkpoint.read_into(out, "matrix", (300, 40))
    checkpoint.close()
    assert torch.equal(out.cpu(), numbers(300, 40))


def test_file_that_is_cut_while_it_is_read_raises(
    folder: Path, gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_writer, "BUFFER_BYTES", 1000)
    checkpoint = Checkpoint(folder)
    out = torch.empty(300, 40, device="cuda")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(20000)
    with pytest.raises(ModelLoadError, match="the file ends before its data"):
        checkpoint.read_into(out, "matrix", (300, 40))
    checkpoint.close()
    checkpoint.close()
