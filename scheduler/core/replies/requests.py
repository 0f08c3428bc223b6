"""RequestTable: the requests of gateways and the sequences that produce their output."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from ....proto.block_tables import IntArray
from ...sequences.beam_group import BeamGroup
from ...sequences.sequence import Sequence

RequestKey = tuple[bytes, int]  # gateway and handle
Producer = Sequence | BeamGroup


class RequestTable:
    """(gateway, handle) |-> producer of its output. All handles of a beam search have the same producer.

    Attributes:
        gateways: gateway |-> its number in RowState.gateway, of those with requests or whose last one ended in the
            present step; read-only.
    """

    def __init__(self) -> None:
        self._producers: dict[RequestKey, Producer] = {}
        self._gateways: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}  # number |-> gateway
        self._num_handles: dict[bytes, int] = {}  # gateway |-> its handles
        self._idle: list[bytes] = []  # gateways that had no handles at some time since the last forget_idle
        self._num_gateways_seen = 0
        self.gateways: Final[Mapping[bytes, int]] = MappingProxyType(self._gateways)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._producers

    def __len__(self) -> int:
        return len(self._producers)

    def get(self, key: RequestKey) -> Producer | None:
        return self._producers.get(key)

    def items(self) -> ItemsView[RequestKey, Producer]:
        return self._producers.items()

    def handles_of(self, gateway: bytes) -> list[int]:
        return [handle for owner, handle in self._producers if owner == gateway]

    def add(self, key: RequestKey, producer: Producer) -> None:
        """Add a handle; a gateway gets its number with its first one."""
        gateway = key[0]
        if key not in self._producers:  # a beam search takes the place of its first sequence
            self._num_handles[gateway] = self._num_handles.get(gateway, 0) + 1
        self._producers[key] = producer
        if gateway not in self._gateways:
            self._gateways[gateway] = self._num_gateways_seen
            self._names[self._num_gateways_seen] = gateway
            self._num_gateways_seen += 1

    def remove(self, key: RequestKey) -> Producer:
        """Remove a handle and return its producer."""
        producer = self._producers.pop(key)
        gateway = key[0]
        self._num_handles[gateway] -= 1
        if not self._num_handles[gateway]:
            self._idle.append(gateway)
        return producer

    def forget_idle(self) -> None:
        """Forget the gateways without handles. Not within a step's result: its tokens are sent by these numbers."""
        for gateway in self._idle:
            if self._num_handles.get(gateway) == 0:
                del self._num_handles[gateway], self._names[self._gateways.pop(gateway)]
        self._idle.clear()

    def by_gateway(self, numbers: IntArray) -> Iterator[tuple[bytes, IntArray]]:
        """Yield each gateway in an array of their numbers, and the indices at which it is."""
        if not numbers.size:
            return
        first = int(numbers[0])
        if (numbers == first).all():  # as with one gateway: 4 us for 1,024 rows, with the sort 20 us
            yield self._names[first], np.arange(numbers.size, dtype=np.int32)
            return
        order = numbers.argsort(kind="stable").astype(np.int32, copy=False)
        ends = np.flatnonzero(np.diff(numbers[order], append=-1)) + 1
        start = 0
        for end in ends.tolist():
            indices = order[start:end]
            yield self._names[int(numbers[indices[0]])], indices
            start = end
