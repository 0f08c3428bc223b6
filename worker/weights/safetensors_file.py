"""SafetensorsFile: reads slices of one safetensors file through a buffer of bounded size.

The safetensors library maps files into memory, where a slice of columns touches the pages of nearly the whole tensor.
Reads here grow the process only by what they return, and by one window of the file per thread: columns are copied out
of a window that is mapped meanwhile. A read per row took 0.06 GB/s for rows of 256 bytes. Windows begin at multiples
of the huge page, and pages that are not in the page cache yet come into it as such pages where the file system can:
a thread then copies an eighth of the columns in 0.15 s per GB instead of 0.25 (ext4, Linux 6.18, AMD EPYC, November
2026, busy). The format: eight bytes of header length (little-endian), the header as JSON (name |-> dtype, shape,
data_offsets), the data.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import mmap
import operator
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import device_writer
from .device_writer import DevicePart, DeviceWriter

MAX_HEADER_BYTES = 16 << 20
BUFFER_BYTES = 4 << 20
# Runs of at least so many bytes that are contiguous in the file are read one by one, shorter ones out of windows.
MIN_RUN_BYTES = 32 << 10
# A box that spans more of the file is read by several threads.
WINDOW_BYTES = 16 << 20
# Windows begin at multiples of it, a multiple of the allocation granularity: Linux's huge page.
_WINDOW_ALIGNMENT = 2 << 20
# Runs that are further apart than this multiple of their length are read one by one too.
MAX_SPARSITY = 64
# Linux's advice, from 5.14 on, to map the pages of a file at once: errors of the disk and the end of the file are
# error numbers then, and no signals that end the process.
POPULATE_READ = 22
# Parts of a file that `SafetensorsFile.sample` reads.
NUM_SAMPLES, SAMPLE_BYTES = 64, 1024

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type and location of a tensor.

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
    """An open safetensors file.

    Attributes:
        tensors: by name.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is not in safetensors format, or truncated.
    """

    def __init__(self, path: Path) -> None:
        # Kept open so that a model replaced on disk during the load is still read consistently.
        self._file = path.open("rb", buffering=0)
        try:
            self.tensors = _read_header(self._file.fileno())
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()

    def sample(self) -> bytes:
        """Return the size of the file and some bytes at equal distances, which tell other weights from these."""
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        starts = (size * index // NUM_SAMPLES for index in range(NUM_SAMPLES))
        return b"".join((size.to_bytes(8), *(os.pread(descriptor, SAMPLE_BYTES, start) for start in starts)))

    def read_into(
        self,
        out: Tensor,
        name: str,
        starts: Sequence[int],
        writer: DeviceWriter | None = None,
        readers: Executor | None = None,
    ) -> int:
        """Copy a box (a slice in every dimension) of a tensor into `out`, converted to the dtype and device of `out`.

        Args:
            out: has the box's shape and any strides.
            starts: of the box in each dimension.
            writer: for tensors on a GPU; without one they are read part by part through pageable memory.
            readers: threads for tensors on a CPU that need no conversion; None to read on this one.

        Returns:
            bytes read.
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
            self._read_on_threads(out, tensor, shape, starts, readers)
            return out.nbytes
        row_bytes = math.prod(out.shape[1:]) * tensor.dtype.itemsize
        if writer is not None:
            parts = list(self._parts(out, tensor, shape, starts, device_writer.BUFFER_BYTES))
            if all(part.num_bytes <= device_writer.BUFFER_BYTES for part in parts):
                writer.write(parts)
                return len(out) * row_bytes
        rows_at_once = max(1, BUFFER_BYTES // row_bytes)
        buffer = torch.empty((min(rows_at_once, len(out)), *out.shape[1:]), dtype=tensor.dtype)
        for first in range(0, len(out), rows_at_once):
            rows = buffer[: min(rows_at_once, len(out) - first)]
            self._read_rows(_bytes_of(rows), tensor, shape, (starts[0] + first, *starts[1:]), rows.shape)
            out[first : first + len(rows)].copy_(rows)
        return len(out) * row_bytes

    def _read_on_threads(
        self,
        out: Tensor,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        starts: tuple[int, ...],
        readers: Executor | None,
    ) -> None:
        """Fill a contiguous tensor with the box."""
        parts = list(self._parts(out, tensor, shape, starts, WINDOW_BYTES))
        if readers is None or len(parts) == 1:
            self._read_rows(_bytes_of(out), tensor, shape, starts, out.shape)
            return
        reads = [readers.submit(part.read, _bytes_of(part.target)) for part in parts]
        wait(reads)  # all of them, since they write to `out`
        for read in reads:
            read.result()

    def _parts(
        self,
        out: Tensor,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        starts: tuple[int, ...],
        part_bytes: int,
    ) -> Iterator[DevicePart]:
        """Yield the parts of a box, along its first dimension of more than one row.

        Args:
            part_bytes: of the file that a part spans, if that is more than one row of this dimension.
        """
        axis = _first_dim(out.shape)
        row_span, row_bytes = (math.prod(of[axis + 1 :]) * tensor.dtype.itemsize for of in (shape, out.shape))
        offset = tensor.offset + tensor.dtype.itemsize * sum(map(operator.mul, starts, _strides(shape)))
        if row_bytes == row_span:
            offset = 0  # read, not mapped: parts of equal length
            part_bytes = max(1, part_bytes // row_span) * row_span
        for first, count in _groups_of_rows(offset, row_span, out.shape[axis], part_bytes):
            rows = out.narrow(axis, first, count)
            own = *starts[:axis], starts[axis] + first, *starts[axis + 1 :]
            read = functools.partial(
                self._read_rows, tensor=tensor, shape=shape, starts=own, lengths=rows.shape
            )
            yield DevicePart(rows, tensor.dtype, read)

    def _read_rows(
        self,
        target: memoryview,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        starts: tuple[int, ...],
        lengths: Sequence[int],
    ) -> None:
        """Fill `target` with the box: by one read per long run of bytes, else out of windows."""
        itemsize = tensor.dtype.itemsize
        run_bytes, distance = _run_len(shape, lengths) * itemsize, _distance(shape, lengths) * itemsize
        if run_bytes < min(MIN_RUN_BYTES, len(target)) and distance <= MAX_SPARSITY * run_bytes:
            out = np.frombuffer(target, np.uint8).reshape(*lengths[:-1], lengths[-1] * itemsize)
            strides = _strides(shape)
            first = tensor.offset + itemsize * sum(map(operator.mul, starts, strides))
            self._read_scattered(out, first, (*(itemsize * stride for stride in strides[:-1]), 1))
            return
        place = 0
        for first, length in _runs(shape, starts, lengths):
            self._read_bytes(target[place : place + length * itemsize], tensor.offset + first * itemsize)
            place += length * itemsize

    def _read_scattered(self, out: NDArray[np.uint8], offset: int, strides: tuple[int, ...]) -> None:
        """Fill `out` with bytes that lie `strides` apart in the file in each dimension, from `offset` on."""
        axis = _first_dim(out.shape)
        groups = list(_groups_of_rows(offset, strides[axis], out.shape[axis], WINDOW_BYTES))
        if len(groups) > 1:
            rows = out.swapaxes(0, axis)
            for first, count in groups:
                own = rows[first : first + count].swapaxes(0, axis)
                self._read_scattered(own, offset + first * strides[axis], strides)
            return
        span = 1 + sum((length - 1) * stride for length, stride in zip(out.shape, strides, strict=True))
        window = self._map_window(offset, span)
        if window is None:
            window = np.empty(span, np.uint8)
            self._read_bytes(window.data, offset)
        np.copyto(out, np.lib.stride_tricks.as_strided(window, out.shape, strides))

    def _map_window(self, offset: int, length: int) -> NDArray[np.uint8] | None:
        """Return bytes of the file, mapped as long as the array lives; None if that is not possible.

        Raises:
            OSError: they cannot be read, or the file ends before them.
        """
        start = offset // _WINDOW_ALIGNMENT * _WINDOW_ALIGNMENT
        try:
            mapped = mmap.mmap(
                self._file.fileno(), offset + length - start, offset=start, access=mmap.ACCESS_READ
            )
            with suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            mapped.madvise(POPULATE_READ)
        except (OSError, ValueError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EFAULT, errno.EIO):
                raise
            return None
        return np.frombuffer(mapped, np.uint8)[offset - start :]

    def _read_bytes(self, target: memoryview, offset: int) -> None:
        while len(target):
            count = os.preadv(self._file.fileno(), [target], offset)
            if count == 0:
                raise ValueError("the file ends before its data")
            target, offset = target[count:], offset + count


def _groups_of_rows(offset: int, stride: int, num_rows: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first and number of the rows that begin between two multiples of `num_bytes` in a file.

    Args:
        offset: of the first row in the file; its rows lie `stride` bytes apart.
    """
    first = 0
    while first < num_rows:
        end = ((offset + first * stride) // num_bytes + 1) * num_bytes
        last = min(num_rows, -(-(end - offset) // stride))
        yield first, last - first
        first = last


def _first_dim(lengths: Sequence[int]) -> int:
    """Return the first dimension of more than one row, or the last one."""
    return next((dim for dim, length in enumerate(lengths) if length > 1), len(lengths) - 1)


def _runs(
    shape: tuple[int, ...], starts: tuple[int, ...], lengths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield first index and length of each contiguous run of a box's elements, in the order of the box."""
    inner, strides, run_len = _inner_dim(shape, lengths), _strides(shape), _run_len(shape, lengths)
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    for outer in itertools.product(*(range(length) for length in lengths[:inner])):
        yield first + sum(place * stride for place, stride in zip(outer, strides, strict=False)), run_len


def _inner_dim(shape: tuple[int, ...], lengths: Sequence[int]) -> int:
    """Return the innermost dimension that a box covers only in part."""
    inner = len(shape) - 1
    while inner > 0 and lengths[inner] == shape[inner]:
        inner -= 1
    return inner


def _run_len(shape: tuple[int, ...], lengths: Sequence[int]) -> int:
    """Return the elements of a box that are contiguous in the file."""
    inner = _inner_dim(shape, lengths)
    return lengths[inner] * math.prod(shape[inner + 1 :])


def _distance(shape: tuple[int, ...], lengths: Sequence[int]) -> int:
    """Return the elements from the begin of a contiguous run of a box to the next one's."""
    return math.prod(shape[_inner_dim(shape, lengths) :])


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _bytes_of(tensor: Tensor) -> memoryview:
    elements: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(elements)


def _read_header(fd: int) -> dict[str, StoredTensor]:
    file_len = os.fstat(fd).st_size
    header_len = int.from_bytes(_read_exactly(fd, 8, 0), "little")
    max_len = min(MAX_HEADER_BYTES, file_len - 8)
    if header_len > max_len:
        raise ValueError(f"its header length is {header_len} bytes, must be at most {max_len}")
    try:
        header = json.loads(_read_exactly(fd, header_len, 8))
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
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
        is_valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"its header has a malformed entry for {name!r}: {error}") from error
    if dtype is None:
        raise ValueError(f"{name!r} has dtype {entry['dtype']}, which is not supported")
    if not is_valid:
        raise ValueError(
            f"its header has an invalid shape or offset for {name!r}: {entry['shape']}, {entry['data_offsets']}"
        )
    tensor = StoredTensor(dtype, shape, data_start + begin)
    if end - begin != tensor.num_bytes or data_start + end > file_len:
        raise ValueError(f"{name!r} ends beyond the file, or its length does not match its shape")
    return tensor


def _read_exactly(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise ValueError(f"it has {offset + len(data)} bytes, expected at least {offset + count}")
    return data
