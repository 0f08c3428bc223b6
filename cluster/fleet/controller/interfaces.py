"""Interfaces between the fleet and its cluster: Launcher and Store. Implemented by Ray and by fakes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from ...config.deployment import Deployment
from ..replica.client import ReplicaClient
from ..replica.launch_progress import OnProgress
from ..replica.record import ReplicaRecord
from ..replica.supervised_replica import LiveReplica
from .fleet_state import NodeEntry


class Launcher(Protocol):
    """Launches, finds and removes replicas. All methods but `connect` and `notice` block and run in threads."""

    def launch(self, deployment: Deployment, replica_id: str, on_progress: OnProgress) -> LiveReplica:
        """Launch a replica. Raises QuireError, and whatever `on_progress` raises.

        `on_progress` is called in this thread at every stage, first as soon as `remove` can find what was started. So
        a launch that is canceled at any stage leaves nothing behind.
        """
        ...

    def adopt(self, record: ReplicaRecord) -> LiveReplica:
        """Return a replica that an earlier controller launched. Raises ReplicaUnavailable if it does not run."""
        ...

    def replace_scheduler(self, live: LiveReplica, number: int) -> LiveReplica:
        """Start another scheduler for a replica whose scheduler ended, on its ranks. The number counts from 2.

        Raises QuireError if a process could not be started, or the ranks do not answer.
        """
        ...

    def remove(self, replica_id: str) -> None:
        """End every process of the replica and free its place. Does nothing if there is none."""
        ...

    def known(self) -> set[str]:
        """Return the ids of all replicas that have a process or a place."""
        ...

    def nodes(self) -> tuple[NodeEntry, ...]:
        """Return the live nodes."""
        ...

    def cordon(self, node_id: str) -> None:
        """Place nothing on the node any more, and let it end once nothing runs there."""
        ...

    def connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        """Return a client, not started, whose replica fails after a silence of `silence_timeout_s`."""
        ...

    def notice(self, node_id: str) -> Future[float] | None:
        """Watch for the cloud's notice that it takes the node back.

        Returns:
            A future that completes with the seconds that are left; None if the cloud gives no notices.
        """
        ...


class Store(Protocol):
    """Key-value store of names and texts that outlives the controller. Blocks, and is called in threads."""

    def read(self) -> Mapping[str, str]: ...
    def write(self, name: str, text: str) -> None: ...
    def delete(self, name: str) -> None: ...
