"""Copies between host and device, pinned memory, and the times at which the host waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .graphs import GARBAGE
from .streams import Stream


class HostWaitError(RuntimeError):
    """The host would wait for the device where it must not."""


class Transfers:
    """Copies that run later, as those of pinned memory do.

    Attributes:
        pinned_addresses: of storages.
    """

    def __init__(self) -> None:
        self.pinned_addresses: set[int] = set()
        self._pending: list[tuple[Stream, int, Callable[[], None]]] = []  # copies to the host
        self._sources: list[tuple[Tensor, Tensor]] = []  # pinned sources of copies, and what they held

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned memory."""
        pinned = tensor.clone()
        address = pinned.untyped_storage().data_ptr()
        self.pinned_addresses.add(address)
        weakref.finalize(pinned.untyped_storage(), self.pinned_addresses.discard, address)
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned_addresses

    def check_sources(self) -> None:
        """Check that pinned memory still holds what was copied from it; the copies have run."""
        for source, held in self._sources:
            assert torch.equal(source, held), "a pinned source changed before its copy to the device had run"
        self._sources.clear()

    def run_pending(self, until: dict[Stream, int] | None) -> None:
        """Run the copies to the host that streams have reached; None: all."""
        left = []
        for stream, time, copy in self._pending:
            if until is not None and until.get(stream, 0) < time:
                left.append((stream, time, copy))
            else:
                copy()
        self._pending = left

    def send(self, source: Tensor, stream: Stream, *, non_blocking: bool) -> bool:
        """Note a copy of host memory to the device; return whether the host waits for it."""
        if source.dim() == 0 or source.numel() == 0:
            return False
        self.run_pending(stream.snapshot)
        if not self.is_pinned(source):
            return True
        if non_blocking:
            self._sources.append((source, source.clone()))
        return False

    def fetch_later(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy device memory to pinned memory, which holds garbage until the host has waited for the stream."""
        if not self.is_pinned(target):
            raise HostWaitError("a copy to memory that is not pinned makes the host wait")
        held = source.clone()
        target.fill_(GARBAGE)

        def copy() -> None:
            target.copy_(held)

        self._pending.append((stream, stream.time, copy))
