"""SafetensorsFile: boxes equal torch's slices, and malformed files raise."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.worker.weights import safetensors_file
from quire.worker.weights.safetensors_file import SafetensorsFile

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.float8_e4m3fn]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"scalar": (), "vector": (37,), "matrix": (23, 41), "stack": (5, 7, 11), "empty": (0, 4)}
    return {
        f"{name}.{dtype}": (torch.randn(shape) * 50).to(dtype)
        for name, shape in shapes.items()
        for dtype in DTYPES
    }


@pytest.mark.parametrize("buffer_bytes", [1, 100, 4 << 20])
def test_read_into_equals_torch_slice(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr(safetensors_file, "BUFFER_BYTES", buffer_bytes)
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    rng = random.Random(1)
    for name, whole in tensors.items():
        assert (file.tensors[name].shape, file.tensors[name].dtype) == (whole.shape, whole.dtype)
        for _ in range(4):
            ranges = [sorted((rng.randint(0, length), rng.randint(0, length))) for length in whole.shape]
            expected = whole[tuple(slice(*ends) for ends in ranges)]
            starts = [start for start, _ in ranges]
            same = torch.empty(expected.shape, dtype=whole.dtype)
            assert file.read_into(same, name, starts) == expected.nbytes
            assert torch.equal(same.float(), expected.float())
            widened = torch.empty(expected.shape, dtype=torch.float64)
            file.read_into(widened, name, starts)
            assert torch.equal(widened, expected.double())
            if whole.dim() == 2:
                turned = torch.empty(expected.shape[::-1], dtype=whole.dtype)
                file.read_into(turned.t(), name, starts)
                assert torch.equal(turned.t().float(), expected.float())


@pytest.mark.parametrize("window_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("num_threads", [0, 3])
def test_scattered_runs_equal_torch_slice(
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    window_bytes: int,
    is_mapped: bool,
    num_threads: int,
) -> None:
    """Out of windows of the file, which are mapped or, where that is not possible, read."""
    monkeypatch.setattr(safetensors_file, "WINDOW_BYTES", window_bytes)
    if not is_mapped:
        monkeypatch.setattr(safetensors_file, "POPULATE_READ", -1)
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    rng = random.Random(2)
    with ThreadPoolExecutor(max(1, num_threads)) as threads:
        for name, whole in tensors.items():
            for _ in range(4):
                ranges = [sorted((rng.randint(0, length), rng.randint(0, length))) for length in whole.shape]
                expected = whole[tuple(slice(*ends) for ends in ranges)]
                out = torch.empty(expected.shape, dtype=whole.dtype)
                starts = [start for start, _ in ranges]
                file.read_into(out, name, starts, readers=threads if num_threads else None)
                assert torch.equal(out.float(), expected.float())


def test_columns_are_read_by_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read per row is 30 times slower; a sparse slice reads its rows alone."""
    num_reads = [0]
    preadv = os.preadv

    def count(*arguments: Any) -> int:
        num_reads[0] += 1
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", count)
    monkeypatch.setattr(safetensors_file, "POPULATE_READ", -1)  # windows are read instead of mapped
    save_file({"x": torch.zeros(4000, 2048, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    file.read_into(torch.empty(4000, 256, dtype=torch.uint8), "x", [0, 256])
    assert num_reads[0] <= 3
    num_reads[0] = 0
    file.read_into(torch.empty(40, 16, dtype=torch.uint8), "x", [0, 256])
    assert num_reads[0] == 40


def test_columns_of_a_truncated_file_raise(tmp_path: Path) -> None:
    """Not a signal that ends the process, as the access to a mapped page would be."""
    save_file({"x": torch.zeros(40, 8192, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("r+b") as opened:
        opened.truncate(20 * 8192)
    with pytest.raises((ValueError, OSError)):
        file.read_into(torch.empty(40, 1024, dtype=torch.uint8), "x", [0, 1024])


def write(path: Path, header: Any, data: bytes = b"", header_len: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_len is None else header_len).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "Expecting"),
        (b"[" * 200_000, "nested too deeply"),
        ({"x": 3}, "malformed entry for 'x'"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "malformed entry for 'x'"),
        (entry(dtype="F3"), "dtype F3, which is not supported"),
        (entry(dtype=["F32"]), "malformed entry for 'x'"),
        (entry(shape=["2"]), "invalid shape or offset for 'x'"),
        (entry(shape=[-2]), "invalid shape or offset for 'x'"),
        (entry(shape=[2.0]), "invalid shape or offset for 'x'"),
        (entry(shape=[3]), "does not match its shape"),
        (entry(offsets=[4, 12]), "ends beyond the file"),
        (entry(shape=[1 << 60], offsets=[0, 1 << 62]), "ends beyond the file"),
        (entry(offsets=[8, 0]), "does not match its shape"),
    ],
)
def test_malformed_header_raises(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SafetensorsFile(write(tmp_path / "x.safetensors", header, bytes(8)))


@pytest.mark.parametrize("header_len", [1 << 63, 1 << 20, 200])
def test_header_longer_than_file_raises(tmp_path: Path, header_len: int) -> None:
    with pytest.raises(ValueError, match=f"its header length is {header_len} bytes, must be at most"):
        SafetensorsFile(write(tmp_path / "x.safetensors", entry(), bytes(8), header_len))


def test_file_truncated_after_open_raises(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", entry(), bytes(8))
    file = SafetensorsFile(path)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 4)
    with pytest.raises(ValueError, match="ends before its data"):
        file.read_into(torch.empty(2), "x", [0])
