"""DeviceWriter: threads that read files into page-locked buffers, which a GPU copies meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..memory.pinned_memory import pinned_zeros

# One thread copies 2 to 6 GB/s out of the page cache, a disk array may deliver more.
NUM_READERS = 8
BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class DevicePart:
    """A part of a tensor to read.

    Attributes:
        target: on the GPU, of any strides.
        dtype: of the elements in the file; they are converted to that of `target`.
        read: fills a buffer with the part's elements, in the order of `target`.
    """

    target: Tensor
    dtype: torch.dtype
    read: Callable[[memoryview], None]

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


@dataclass(slots=True)
class _Buffer:
    """Page-locked memory; `copied` is the event of its latest copy."""

    memory: Tensor
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the GPU has copied it."""
        if self.copied is not None:
            self.copied.synchronize()


class DeviceWriter:
    """Writes parts of files to the current GPU, in the order of the current stream.

    Raises:
        MemoryError: the buffers cannot be page-locked.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights")
        buffers = [_Buffer(pinned_zeros((BUFFER_BYTES,), torch.uint8)) for _ in range(2 * NUM_READERS)]
        # In the order in which their copies end.
        self._free: deque[_Buffer] = deque(buffers)
        self._all = buffers

    def write(self, parts: Iterable[DevicePart]) -> None:
        """Read all parts and launch their copies. A part has at most BUFFER_BYTES.

        Raises:
            whatever `read` raises.
        """
        reads: deque[tuple[Future[None], _Buffer, Tensor, DevicePart]] = deque()
        try:
            for part in parts:
                if not self._free:
                    self._copy(*reads.popleft())
                buffer = self._free.popleft()
                buffer.wait()
                rows = buffer.memory[: part.num_bytes].view(part.dtype).view(part.target.shape)
                future = self._threads.submit(part.read, _bytes_of(rows))
                reads.append((future, buffer, rows, part))
            while reads:
                self._copy(*reads.popleft())
        finally:
            for future, buffer, _, _ in reads:  # after a failure
                future.cancel()
                self._free.append(buffer)

    def close(self) -> None:
        """End the threads, and free the buffers after their copies. Safe to call twice."""
        self._threads.shutdown(cancel_futures=True)
        for buffer in self._all:
            buffer.wait()
        self._all = []
        self._free.clear()

    def _copy(self, read: Future[None], buffer: _Buffer, rows: Tensor, part: DevicePart) -> None:
        """Launch the copy of a buffer when it is filled."""
        try:
            read.result()
            if rows.dtype == part.target.dtype:
                part.target.copy_(rows, non_blocking=True)
            else:  # torch would convert on the host
                part.target.copy_(rows.to(part.target.device, non_blocking=True))
            buffer.copied = torch.cuda.Event()
            buffer.copied.record()
        finally:
            self._free.append(buffer)


def _bytes_of(tensor: Tensor) -> memoryview:
    elements: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(elements)
