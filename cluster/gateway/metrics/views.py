"""Views of a gateway that metrics are read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from ....proto import admin_pb2
from ....proto.config import EngineConfig
from ...fleet.replica.client import ReplicaClient


class PoolView(Protocol):
    """The replicas of one model."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a replica."""
        ...

    @property
    def num_warmed_tokens(self) -> int:
        """Tokens of prefixes that replicas were told to read when they became ready."""
        ...

    @property
    def clients(self) -> Mapping[str, ReplicaClient]:
        """replica_id |-> its client."""
        ...

    def why_unavailable(self, replica_id: str) -> str:
        """Return why the replica gets no requests; empty if it gets requests."""
        ...


class ModelView(Protocol):
    """A served model."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def pool(self) -> PoolView: ...


class ModelsView(Protocol):
    """The models that a gateway serves now."""

    def __iter__(self) -> Iterator[ModelView]: ...


class FleetView(Protocol):
    """The fleet behind a gateway."""

    def describe(self) -> admin_pb2.GetStatusResponse: ...
