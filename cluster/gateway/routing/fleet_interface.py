"""Fleet and FaultInjector: the replicas behind a gateway, as its Admin service changes and harms them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ....proto import admin_pb2
from ....proto.faults import Fault
from ...fleet.controller.fleet_state import FleetCommand


class Fleet(Protocol):
    """The fleet behind a gateway."""

    def describe(self) -> admin_pb2.GetStatusResponse:
        """Return the fleet's state, without the load figures that only replicas have."""
        ...

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        """Have an operator's command carried out; return the fields of its response.

        Raises:
            QuireError: the fleet refused the command; ReplicaUnavailable if its controller does not answer.
        """
        ...


class FaultInjector(Protocol):
    """Causes faults in the processes of replicas."""

    async def inject(self, replica_id: str, rank: int | None, fault: Fault) -> int:
        """Cause a fault in a rank, or in the scheduler if `rank` is None; return its process id.

        Raises:
            InvalidRequest: the replica has no such rank.
            ReplicaUnavailable: the process does not run or does not answer.
        """
        ...
