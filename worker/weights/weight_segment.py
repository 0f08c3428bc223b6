"""Weights in a segment of shared memory: written by the process that reads them, mapped by the one that replaces it.

The segment has the weights as the ops read them, packed for the processor, so that a process that maps them reads and
packs nothing. It begins with a header and ends with a table of records (`weight_records`) in JSON, with a checksum of
each tensor for copies of the segment. It is sealed when all weights are in it: afterwards no process can change it.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..memory.checksum import checksum
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .weight_records import NoRecordError, Record, Weight, from_record, tensor_at, tensor_record, to_record

PURPOSE = "weights"
# A format, the table's start and its length.
_HEADER = struct.Struct("<8sQQ")
_FORMAT = b"quirew02"
_TABLE_FIELDS = frozenset({"identity", "records", "checksums", "packing_s"})
# Of torch's own allocations on a CPU.
_ALIGNMENT = 64

W = TypeVar("W", bound=Weight)


class WeightStore(Protocol):
    """Source of the weights that ops read in place; see `LoadContext`."""

    def keep(self, key: str, read: Callable[[], W]) -> W:
        """Return the weight of a key, which `read` returns as well. Nobody may change it afterwards."""
        ...


class NoStore:
    """A WeightStore in the process's own memory."""

    def keep(self, key: str, read: Callable[[], W]) -> W:
        return read()


class SegmentWriter:
    """A WeightStore that moves weights into a segment as they are read.

    Weights without a record stay in the process's own memory, and are read again by whoever replaces it.

    Args:
        identity: of the weights, as JSON values.
        max_bytes: upper bound of their size; memory is allocated as they are written.

    Attributes:
        reading_s: seconds of `keep` in which files were read, as the owner of the files knows them.

    Raises:
        OSError: the segment cannot be created.
    """

    def __init__(self, identity: Mapping[str, Any], max_bytes: int) -> None:
        self._identity = identity
        self._segment = SharedSegment.create(PURPOSE, _HEADER.size + max_bytes)
        self._memory = torch.frombuffer(self._segment.map_private(), dtype=torch.uint8)
        self._end = _HEADER.size
        self._records: dict[str, Record] = {}
        self._checksums: list[tuple[int, int, int]] = []  # start, length and checksum of each tensor
        self._making_s = self.reading_s = 0.0

    def keep(self, key: str, read: Callable[[], W]) -> W:
        if key not in self._records:
            started = time.monotonic()
            weight = read()
            self._making_s += time.monotonic() - started
            try:
                self._records[key] = to_record(weight, self._store)
            except NoRecordError:
                return weight
        retained: W = from_record(self._records[key], lambda record: tensor_at(record, self._memory))
        return retained

    def finish(self) -> SharedSegment:
        """Write the table, seal the segment and return it."""
        content = {
            "identity": self._identity,
            "records": self._records,
            "checksums": self._checksums,
            "packing_s": max(0.0, self._making_s - self.reading_s),
        }
        table = json.dumps(content).encode()
        self._segment.write(table, self._end)
        self._segment.write(_HEADER.pack(_FORMAT, self._end, len(table)), 0)
        self._segment.seal(self._end + len(table))
        return self._segment

    def close(self) -> None:
        """Close the segment after a failure."""
        self._segment.close()

    def _store(self, tensor: Tensor) -> Record:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        record = tensor_record(tensor, start)
        if start + tensor.nbytes > len(self._memory):
            raise NoRecordError(f"a tensor beyond the {len(self._memory)} bytes of the segment")
        content = _bytes_of(tensor)
        self._segment.write(content, start)
        self._checksums.append((start, tensor.nbytes, checksum(np.frombuffer(content, np.uint8))))
        self._end = start + tensor.nbytes
        return record


class SegmentReader:
    """A WeightStore of weights that another process has written.

    Args:
        identity: as of the writer.

    Attributes:
        segment: is open.

    Raises:
        OSError: the segment cannot be opened or mapped.
        ValueError: it holds other weights, or is not complete.
    """

    def __init__(self, address: SegmentAddress, identity: Mapping[str, Any]) -> None:
        self.segment = SharedSegment.open(address)
        try:
            if not self.segment.is_sealed:
                raise ValueError("the segment is not complete")
            mapped = self.segment.map_private()
            table = read_table(mapped)
            if table["identity"] != identity:
                raise ValueError(difference(table["identity"], identity))
        except BaseException:
            self.segment.close()
            raise
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._records: dict[str, Record] = table["records"]
        self._checksums: list[tuple[int, int, int]] = table["checksums"]

    def check_content(self) -> None:
        """Compare each tensor with its checksum, in a segment that was copied.

        Raises:
            ValueError: a tensor has other bytes than were written.
        """
        content = self._memory.numpy()
        for start, length, expected in self._checksums:
            if checksum(content[start : start + length]) != expected:
                raise ValueError(f"the tensor at byte {start} of the copy differs from what was written")

    def keep(self, key: str, read: Callable[[], W]) -> W:
        record = self._records.get(key)
        if record is None:
            return read()
        retained: W = from_record(record, lambda own: tensor_at(own, self._memory))
        return retained

    def finish(self) -> SharedSegment:
        """Return the segment."""
        return self.segment

    def close(self) -> None:
        """Close the segment after a failure."""
        self.segment.close()


def read_table(mapped: mmap.mmap) -> dict[str, Any]:
    """Return the table of a complete segment, with all its fields.

    Raises:
        ValueError: the segment has another format.
    """
    if len(mapped) < _HEADER.size:
        raise ValueError(f"the segment has {len(mapped)} bytes, must have at least {_HEADER.size}")
    format_name, start, num_bytes = _HEADER.unpack_from(mapped)
    if format_name != _FORMAT:
        raise ValueError(f"the segment has format {format_name!r}, must have {_FORMAT!r}")
    table = json.loads(mapped[start : start + num_bytes])
    if not isinstance(table, dict) or not table.keys() >= _TABLE_FIELDS:
        raise ValueError(f"the table of the segment must have {', '.join(sorted(_TABLE_FIELDS))}")
    return table


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return a sentence that names what differs between two identities."""
    keys = [key for key in expected if found.get(key) != expected[key]]
    return f"the segment has weights with another {', '.join(keys) or 'identity'}"


def _bytes_of(tensor: Tensor) -> memoryview:
    elements: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(elements)
