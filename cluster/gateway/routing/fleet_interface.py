"""Fleet and FaultInjector: the replicas behind a gateway, as its Admin service changes and harms them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....proto import admin_pb2
from ....proto.faults import Fault
from ...config.deployment import Deployment


class Fleet(Protocol):
    """The fleet behind a gateway."""

    def describe(self) -> admin_pb2.GetStatusResponse:
        """Return the fleet's state, without the load figures that only replicas have."""
        ...

    async def deploy(self, deployment: Deployment) -> str:
        """Add or change a deployment and return its version.

        Raises:
            ConfigError: the model cannot be served.
            ReplicaUnavailable: the controller does not answer.
        """
        ...

    async def delete(self, model: str) -> None:
        """Raises ModelNotFound, or ReplicaUnavailable if the controller does not answer."""
        ...

    async def drain(self, target: str) -> Sequence[str]:
        """Drain a replica or a node, by id or unique prefix; return the ids of the replicas that drain.

        Raises:
            InvalidRequest: no replica or node matches, or more than one does.
            ReplicaUnavailable: the controller does not answer.
        """
        ...

    async def undrain(self, target: str) -> str:
        """Take back the drain of a replica that waits for another one to take over; return its id.

        Raises:
            InvalidRequest: no replica matches, more than one does, or the replica does not wait.
            ReplicaUnavailable: the controller does not answer.
        """
        ...

    async def set_scale(
        self, model: str, min_replicas: int | None, max_replicas: int | None
    ) -> tuple[int, int]:
        """Change the bounds of a deployment's replicas; None keeps one. Returns both.

        Raises:
            ModelNotFound: the model is not deployed.
            ConfigError: a bound is out of its range.
            ReplicaUnavailable: the controller does not answer.
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
