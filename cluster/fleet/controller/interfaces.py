"""The fleet's interfaces to its cluster: Launcher and Store, as Ray and fakes implement them, and their threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from ....proto.errors import QuireError, ReplicaUnavailable
from ...config.deployment import Deployment
from ..replica.client import ReplicaClient
from ..replica.launch_progress import OnProgress
from ..replica.record import ReplicaRecord
from ..replica.supervised_replica import LiveReplica
from .fleet_state import NodeEntry

# Begins of the names in a FleetStore.
_DEPLOYMENT = "deployment/"
_REPLICA = "replica/"
CALL_TIMEOUT_S = 60.0
# Concurrent calls.
MAX_CALLS = 32
# Concurrent launches. Each occupies a thread while it waits for room; further launches wait for one to end.
MAX_LAUNCHES = 512

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Launcher(Protocol):
    """Launches, finds and removes replicas. All methods but `connect` and `notice` block and run in threads."""

    def launch(
        self, deployment: Deployment, replica_id: str, on_progress: OnProgress, peers: Sequence[str] = ()
    ) -> LiveReplica:
        """Launch a replica. Raises QuireError, and whatever `on_progress` raises.

        `peers` are ready replicas with the same weights, which it may take them from. They may end meanwhile.

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


class FleetStore:
    """Deployments by model name, and replicas by id, each with the deployment that it was started for. Blocks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> tuple[list[Deployment], list[tuple[Deployment, ReplicaRecord]]]:
        """Return (deployments, replicas). Entries that cannot be read are logged and skipped."""
        deployments, replicas = [], []
        for name, text in self._store.read().items():
            try:
                if name.startswith(_DEPLOYMENT):
                    deployments.append(Deployment.from_json(text))
                elif name.startswith(_REPLICA):
                    deployment, _, record = text.partition("\n")
                    replicas.append((Deployment.from_json(deployment), ReplicaRecord.from_json(record)))
            except QuireError as error:
                _log.error("%s cannot be read and is skipped: %s", name, error)
        return deployments, replicas

    def write_deployment(self, deployment: Deployment) -> None:
        self._store.write(_DEPLOYMENT + deployment.name, deployment.to_json())

    def delete_deployment(self, name: str) -> None:
        self._store.delete(_DEPLOYMENT + name)

    def write_replica(self, deployment: Deployment, record: ReplicaRecord) -> None:
        self._store.write(_REPLICA + record.replica_id, f"{deployment.to_json()}\n{record.to_json()}")

    def delete_replica(self, replica_id: str) -> None:
        self._store.delete(_REPLICA + replica_id)


class BlockingCalls:
    """Threads for calls that would block the fleet's event loop, with a deadline.

    Three pools: launches may wait for machines for a long time, and removals of many replicas for lost nodes. Neither
    may delay the other calls, without which no reconciliation step ends.
    """

    def __init__(self) -> None:
        self._calls = ThreadPoolExecutor(MAX_CALLS, "fleet")
        self._removals = ThreadPoolExecutor(MAX_CALLS, "remove")
        self._launches = ThreadPoolExecutor(MAX_LAUNCHES, "launch")

    async def call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        """Return the function's result. A call that has begun continues if its caller is canceled.

        Args:
            what: names the call in errors, as in ``reading the nodes``.

        Raises:
            ReplicaUnavailable: the call took more than CALL_TIMEOUT_S.
        """
        return await self._wait(what, self._calls.submit(function, *arguments))

    async def remove(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that ends processes; see `call`."""
        return await self._wait(what, self._removals.submit(function, *arguments))

    async def _wait(self, what: str, called: Future[T]) -> T:
        result = asyncio.wrap_future(called)
        await asyncio.wait((result,), timeout=CALL_TIMEOUT_S)
        if not result.done():
            result.cancel()
            raise ReplicaUnavailable(f"{what} took more than {CALL_TIMEOUT_S:g} s")
        return result.result()

    def launch(self, function: Callable[[], T]) -> Future[T]:
        """Begin a launch. Launches have deadlines of their own."""
        return self._launches.submit(function)

    def close(self) -> None:
        """Cancel calls that have not begun, without waiting for the others."""
        for pool in (self._calls, self._removals, self._launches):
            pool.shutdown(wait=False, cancel_futures=True)
