"""SafetensorsFile: boxes equal torch's slices, and malformed files raise."""

from __future__ import annotations

import json
import random
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
