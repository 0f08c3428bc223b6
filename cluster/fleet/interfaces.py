"""What the fleet's upkeep needs of a cluster: who launches replicas, and who remembers. Ray behind it, or fakes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from ...proto.errors import QuireError
from ..config.deployment import Deployment
from ..controller_api.fleet_state import NodeEntry
from ..replica.client import ReplicaClient
from ..replica.launch_progress import Tell
from ..replica.replica import ReplicaRecord


class LiveReplica(Protocol):
    """A replica whose processes run; `cluster.replica.Replica` is one.

    Attributes:
        failure: ends when the replica does: with why, or None when it was closed.
    """

    @property
    def record(self) -> ReplicaRecord: ...
    @property
    def failure(self) -> Future[QuireError | None]: ...
    def close(self) -> None:
        """Ends its processes; blocks."""
        ...


class Launcher(Protocol):
    """Where replicas come from. All but `connect` and `notice` block, and are called in threads."""

    def launch(self, deployment: Deployment, replica_id: str, tell: Tell) -> LiveReplica:
        """Raises QuireError, and what `tell` does.

        `tell` is told of every stage, from that thread, and first when `remove` can find what there is: so a launch
        that nobody wants any more leaves nothing, whenever that becomes known.
        """
        ...

    def adopt(self, record: ReplicaRecord) -> LiveReplica:
        """A replica that an earlier controller launched. Raises ReplicaUnavailable."""
        ...

    def remove(self, replica_id: str) -> None:
        """Ends whatever there is of it."""
        ...

    def known(self) -> set[str]:
        """Every replica of which there is anything."""
        ...

    def nodes(self) -> tuple[NodeEntry, ...]:
        """The live nodes."""
        ...

    def cordon(self, node_id: str) -> None:
        """Has nothing placed on the node any more, and lets it go once nothing runs there."""
        ...

    def connect(self, record: ReplicaRecord, patience_s: float) -> ReplicaClient:
        """A line to the replica, not started; a replica that is silent for longer has failed."""
        ...

    def notice(self, node_id: str) -> Future[float] | None:
        """Ends with the seconds that the node has left, once its cloud wants it back; None: nobody would know."""
        ...


class Store(Protocol):
    """Where the controller's memory outlives it: names and JSON. Blocks, and is called in threads."""

    def read(self) -> Mapping[str, str]: ...
    def write(self, name: str, text: str) -> None: ...
    def delete(self, name: str) -> None: ...
