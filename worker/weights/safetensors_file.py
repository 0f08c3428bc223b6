"""Reading one safetensors file: only the bytes that are asked for, through a buffer of bounded size.

The safetensors library maps files into memory, where the pages that a slice of columns touches are those of nearly
the whole tensor; what is read here grows the process by what it keeps, and by nothing else. The format: eight
bytes of header length (little-endian), the header as JSON (name |-> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100 << 20
BUFFER_BYTES = 4 << 20

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a tensor is, and where it lies.

    Attributes:
        offset: of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """An open file.

    Attributes:
        tensors: by name.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no safetensors file, or not all of one.
    """

    def __init__(self, path: Path) -> None:
        # Held open, so that a model that is replaced on disk while it loads is still read as one.
        self._file = path.open("rb", buffering=0)
        try:
            self.tensors = _read_header(self._file.fileno())
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()

    def read_into(self, out: Tensor, name: str, starts: Sequence[int]) -> int:
        """Copies a box of a tensor into `out`, converting to its dtype and device.

        Args:
            out: of the box's shape, with any strides.
            starts: of the box, in each dimension.

        Returns:
            Bytes read.
        """
        tensor = self.tensors[name]
        fits = len(starts) == len(tensor.shape) == out.dim() and all(
            start >= 0 and start + length <= full
            for start, length, full in zip(starts, out.shape, tensor.shape, strict=True)
        )
        assert fits, f"box at {list(starts)} of shape {list(out.shape)} in {list(tensor.shape)}"
        if out.numel() == 0:
            return 0
        shape, starts = tensor.shape or (1,), tuple(starts) or (0,)
        out = out.view(1) if out.dim() == 0 else out
        if out.is_cpu and out.dtype == tensor.dtype and out.is_contiguous():
            self._read_rows(_bytes_of(out), tensor, shape, starts, out.shape)
            return out.nbytes
        row_bytes = math.prod(out.shape[1:]) * tensor.dtype.itemsize
        rows_at_once = max(1, BUFFER_BYTES // row_bytes)
        buffer = torch.empty((min(rows_at_once, len(out)), *out.shape[1:]), dtype=tensor.dtype)
        for first in range(0, len(out), rows_at_once):
            rows = buffer[: min(rows_at_once, len(out) - first)]
            self._read_rows(_bytes_of(rows), tensor, shape, (starts[0] + first, *starts[1:]), rows.shape)
            out[first : first + len(rows)].copy_(rows)
        return len(out) * row_bytes

    def _read_rows(
        self,
        target: memoryview,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        starts: tuple[int, ...],
        lengths: Sequence[int],
    ) -> None:
        """Fills `target` with the box, run by run of bytes that lie together in the file."""
        itemsize = tensor.dtype.itemsize
        place = 0
        for first, length in _runs(shape, starts, lengths):
            self._read_bytes(target[place : place + length * itemsize], tensor.offset + first * itemsize)
            place += length * itemsize

    def _read_bytes(self, target: memoryview, offset: int) -> None:
        while len(target):
            count = os.preadv(self._file.fileno(), [target], offset)
            if count == 0:
                raise ValueError("the file ends before its data do")
            target, offset = target[count:], offset + count


def _runs(
    shape: tuple[int, ...], starts: tuple[int, ...], lengths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """First number and count of each run of a box's numbers that are neighbours in the tensor, in the box's order."""
    inner = len(shape) - 1  # the innermost dimension of which the box has a part only
    while inner > 0 and lengths[inner] == shape[inner]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run_len = lengths[inner] * strides[inner]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    for outer in itertools.product(*(range(length) for length in lengths[:inner])):
        yield first + sum(place * stride for place, stride in zip(outer, strides, strict=False)), run_len


def _bytes_of(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(numbers)


def _read_header(fd: int) -> dict[str, StoredTensor]:
    file_len = os.fstat(fd).st_size
    header_len = int.from_bytes(_read_exactly(fd, 8, 0), "little")
    if header_len > min(MAX_HEADER_BYTES, file_len - 8):
        raise ValueError(f"its header would have {header_len} bytes")
    try:
        header = json.loads(_read_exactly(fd, header_len, 8))
    except RecursionError as error:
        raise ValueError("its header is nested too deep") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    data_start = 8 + header_len
    return {
        name: _read_entry(name, entry, data_start, file_len)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_entry(name: str, entry: Any, data_start: int, file_len: int) -> StoredTensor:
    try:
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"its header describes {name!r} wrongly: {error}") from error
    if dtype is None:
        raise ValueError(f"{name!r} has dtype {entry['dtype']}, which is not supported")
    if not sound:
        raise ValueError(f"its header describes {name!r} with numbers that are none")
    tensor = StoredTensor(dtype, shape, data_start + begin)
    if end - begin != tensor.num_bytes or data_start + end > file_len:
        raise ValueError(f"{name!r} lies outside it, or is not as long as its shape says")
    return tensor


def _read_exactly(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise ValueError(f"it has {offset + len(data)} bytes, expected at least {offset + count}")
    return data
