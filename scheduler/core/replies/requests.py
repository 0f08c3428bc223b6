"""RequestTable: the requests of gateways and the sequences that produce their output."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping
from types import MappingProxyType
from typing import Final

from ...sequences.beam_group import BeamGroup
from ...sequences.sequence import Sequence

RequestKey = tuple[bytes, int]  # gateway and handle
Producer = Sequence | BeamGroup


class RequestTable:
    """(gateway, handle) |-> producer of its output. All handles of a beam search have the same producer.

    Attributes:
        gateways: gateway |-> its number in RowState.gateway; read-only.
    """

    def __init__(self) -> None:
        self._producers: dict[RequestKey, Producer] = {}
        self._gateways: dict[bytes, int] = {}
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
        self._producers[key] = producer
        if key[0] not in self._gateways:
            self._gateways[key[0]] = self._num_gateways_seen
            self._num_gateways_seen += 1

    def remove(self, key: RequestKey) -> Producer:
        """Remove a handle and return its producer."""
        return self._producers.pop(key)

    def forget_gateway(self, gateway: bytes) -> None:
        """Forget the number of a gateway that has no requests."""
        self._gateways.pop(gateway, None)
