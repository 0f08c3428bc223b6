"""FleetEvents: the changes of a gateway's deployments, replicas and nodes, as differences of its state."""

from __future__ import annotations

import time
from collections.abc import Callable

from ....proto import admin_pb2
from .services import GatewayServices
from .status import latest_status

_Object = admin_pb2.DeploymentStatus | admin_pb2.Replica | admin_pb2.Node

# Fields of a replica that are events; the other ones are figures, which change all the time.
_REPLICA_FIELDS = ("replica_id", "model", "ready", "problem", "state", "version")


class FleetEvents:
    """Changes since the last call, for one reader. A slow reader sees only the latest state of an object.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, services: GatewayServices, clock: Callable[[], float] = time.time) -> None:
        self._services = services
        self._clock = clock
        self._known: dict[tuple[str, str], _Object] = {}

    def take(self) -> list[admin_pb2.WatchEventsResponse]:
        """Return an event for each object that is new, has changed or exists no more; at first for each object."""
        present, known = _objects(latest_status(self._services)), self._known
        self._known = present
        changed = [(key, each, False) for key, each in present.items() if known.get(key) != each]
        removed = [(key, each, True) for key, each in known.items() if key not in present]
        return [self._event(kind, each, is_removed) for (kind, _), each, is_removed in changed + removed]

    def _event(self, kind: str, each: _Object, is_removed: bool) -> admin_pb2.WatchEventsResponse:
        event = admin_pb2.WatchEventsResponse(time=self._clock(), removed=is_removed)
        getattr(event, kind).CopyFrom(each)
        return event


def _objects(status: admin_pb2.GetStatusResponse) -> dict[tuple[str, str], _Object]:
    """Return (kind, id) |-> object."""
    objects: dict[tuple[str, str], _Object] = {
        ("deployment", deployment.model): deployment for deployment in status.deployments
    }
    objects |= {("replica", replica.replica_id): _without_figures(replica) for replica in status.replicas}
    objects |= {("node", node.node_id): node for node in status.nodes}
    return objects


def _without_figures(replica: admin_pb2.Replica) -> admin_pb2.Replica:
    values = {name: getattr(replica, name) for name in _REPLICA_FIELDS}
    return admin_pb2.Replica(**values, node_ids=replica.node_ids)
