"""SpareProcesses: idle processes of Ray on a replica's nodes, which take the place of processes that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import grpc
import ray

from . import compat

# For a raylet to answer. It asks every process of its node, and a stopped one answers late.
RAYLET_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Raylets(Protocol):
    """Calls to the raylets of nodes; see `compat`."""

    def num_idle_processes(self, address: str, timeout_s: float) -> int: ...

    def start_idle_processes(self, address: str, count: int, timeout_s: float) -> None: ...


class SpareProcesses:
    """Keeps `count` idle processes on each of some nodes.

    The next actor that starts on such a node gets one of them: a process in which Python, Ray and, if the node was
    started with RAY_preload_python_modules, the modules of ranks and schedulers are loaded. Spares belong to nobody:
    the replicas of a node share them.

    Args:
        node_ids: Ray's ids of the nodes, which may contain duplicates.
        count: 0 keeps none.
        raylets: by default Ray's own.
    """

    def __init__(self, node_ids: Iterable[str], count: int, raylets: Raylets = compat) -> None:
        self._node_ids = tuple(dict.fromkeys(node_ids))
        self._count = count
        self._raylets = raylets
        self._replenishing = threading.Lock()

    def replenish(self) -> None:
        """Have spare processes started where there are too few. Returns at once; a failure is logged."""
        if self._count and self._node_ids:
            threading.Thread(target=self._replenish_nodes, name="spare-processes", daemon=True).start()

    def _replenish_nodes(self) -> None:
        with self._replenishing:  # otherwise two threads would each start what is missing
            try:
                addresses = raylet_addresses(ray.nodes())
            except Exception as error:  # any, of a cluster that is shutting down
                _log.warning("no spare processes were started: the cluster's nodes are not known: %s", error)
                return
            for node_id in self._node_ids:
                if node_id in addresses:
                    self._replenish_node(addresses[node_id])

    def _replenish_node(self, address: str) -> None:
        try:
            missing = self._count - self._raylets.num_idle_processes(address, RAYLET_TIMEOUT_S)
            if missing > 0:
                self._raylets.start_idle_processes(address, missing, RAYLET_TIMEOUT_S)
        except grpc.RpcError as error:
            _log.warning("no spare processes were started on %s: %s", address, error)


def raylet_addresses(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return node id |-> ``HOST:PORT`` of its raylet, for each live node of `ray.nodes()`."""
    return {
        node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        for node in nodes
        if node["Alive"]
    }
