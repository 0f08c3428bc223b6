"""Streams and events of the stand-in GPU, and the order in which streams use memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .current import current_gpu

DEVICE = torch.device("cuda", 0)


class StreamError(AssertionError):
    """Two streams use the same memory, and neither waits for the other."""


@dataclass(eq=False)
class Stream:
    """A stream.

    Attributes:
        time: ops launched so far.
        seen: stream |-> its time that this stream has waited for.
    """

    device: torch.device = DEVICE
    time: int = 0
    seen: dict[Stream, int] = field(default_factory=dict)

    @property
    def snapshot(self) -> dict[Stream, int]:
        """Time of each stream, this one included, that is over when this one has done its ops."""
        return self.seen | {self: self.time}

    def has_seen(self, stream: Stream, time: int) -> bool:
        """Return whether ops of this stream come after a time of a stream."""
        return stream is self or self.seen.get(stream, 0) >= time

    def wait_stream(self, other: Stream) -> None:
        self._wait_for(other.snapshot)

    def wait_event(self, event: Event) -> None:
        self._wait_for(event.snapshot)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        current_gpu().host_waits("stream.synchronize", self.snapshot)

    def _wait_for(self, times: dict[Stream, int]) -> None:
        for stream, time in times.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))


class Event:
    """An event; `snapshot` is that of the stream that recorded it."""

    def __init__(self, **_: Any) -> None:
        self.snapshot: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.snapshot = (stream or current_gpu().stream).snapshot

    def synchronize(self) -> None:
        current_gpu().host_waits("event.synchronize", self.snapshot)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_gpu().stream).wait_event(self)

    def query(self) -> bool:
        return False


class MemoryOrder:
    """The last uses of each storage; raises StreamError if the next one does not wait for them."""

    def __init__(self) -> None:
        self._writes: dict[int, tuple[Stream, int]] = {}  # address of a storage |-> its last writer
        self._reads: dict[int, dict[Stream, int]] = {}  # the same |-> readers since then

    def note_read(self, host: Tensor, stream: Stream) -> None:
        """Note that a stream reads a tensor."""
        address = host.untyped_storage().data_ptr()
        writer, time = self._writes.get(address, (stream, 0))
        if not stream.has_seen(writer, time):
            raise StreamError(
                f"a tensor of shape {list(host.shape)} is read before the stream that wrote it ends"
            )
        self._reads.setdefault(address, {})[stream] = stream.time

    def note_write(self, host: Tensor, stream: Stream) -> None:
        """Note that a stream writes to a tensor."""
        address = host.untyped_storage().data_ptr()
        if not all(stream.has_seen(*read) for read in self._reads.get(address, {}).items()):
            raise StreamError(f"a tensor of {list(host.shape)} is written while another stream reads it")
        self.note_new(host, stream)

    def note_new(self, host: Tensor, stream: Stream) -> None:
        """Note that a stream has made a tensor, in memory whose earlier uses do not count."""
        address = host.untyped_storage().data_ptr()
        self._writes[address] = stream, stream.time
        self._reads[address] = {stream: stream.time}

    def forget_writer(self, host: Tensor) -> None:
        """Note a tensor that a recording has made, which no stream has written yet."""
        self._writes.pop(host.untyped_storage().data_ptr(), None)
