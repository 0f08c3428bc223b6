"""The state of a gateway's replicas and traffic for operators: whole, as load of its models, and as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from ....proto import admin_pb2
from ....proto.block_map import BlockMap
from ....proto.errors import InvalidRequest, ReplicaUnavailable
from ....proto.replica_status import ReplicaStatus
from ...client.wire.admin_messages import replica_to_message
from ...client.wire.message_fields import to_message
from ...fleet.replica.client import ReplicaClient
from ..routing.replica_pool import ReplicaPool
from ..routing.served_models import ServedModel, ServedModels
from .services import GatewayServices

# A replica answers within 0.1 s whatever its ranks do; one that does not is shown by its latest status.
STATUS_TIMEOUT_S = 0.4

_Object = admin_pb2.DeploymentStatus | admin_pb2.Replica | admin_pb2.Node
# Fields of a replica that are events; the other ones are figures, which change all the time.
_REPLICA_FIELDS = ("replica_id", "model", "ready", "problem", "state", "version")


async def current_status(services: GatewayServices) -> admin_pb2.GetStatusResponse:
    """Return the state; every replica of this gateway is asked for its own, within STATUS_TIMEOUT_S."""
    queries = [_ask(pool, replica_id) for pool in _pools(services) for replica_id in pool.clients]
    replicas, unused = await asyncio.gather(asyncio.gather(*queries), _unused_statuses(services))
    return _compose(services, replicas, unused)


async def latest_status(services: GatewayServices) -> admin_pb2.GetStatusResponse:
    """Return the state with the latest status of each replica. Asks no replica."""
    return _compose(services, _latest(services), await _unused_statuses(services))


async def block_map(services: GatewayServices, replica_id: str, timeout_s: float) -> BlockMap:
    """Return the map of a replica's KV blocks.

    Raises:
        InvalidRequest: there is no such replica.
        ReplicaUnavailable: the replica does not answer in time.
    """
    for pool in _pools(services):
        async with pool.reach([replica_id]) as reached:
            for client in reached.values():
                return await client.block_map(timeout_s)
    raise InvalidRequest("replica_id", f"is {replica_id!r}, which is no replica of this server")


def _latest(services: GatewayServices) -> list[admin_pb2.Replica]:
    return [
        _describe(pool, replica_id, client)
        for pool in _pools(services)
        for replica_id, client in pool.clients.items()
    ]


async def _unused_statuses(services: GatewayServices) -> Mapping[str, ReplicaStatus]:
    """Return replica_id |-> status of replicas that only other gateways use; not all, if the controller is late."""
    if services.fleet is None or not any(pool.unused_ids for pool in _pools(services)):
        return {}
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return {each.replica_id: each for each in await services.fleet.statuses()}
    except (TimeoutError, ReplicaUnavailable):
        return {}


def _pools(services: GatewayServices) -> list[ReplicaPool]:
    return [model.pool for model in services.models]


def _compose(
    services: GatewayServices,
    replicas: Iterable[admin_pb2.Replica],
    unused: Mapping[str, ReplicaStatus] | None = None,
) -> admin_pb2.GetStatusResponse:
    """Return the fleet's state, if there is a fleet, with the replicas and the traffic added.

    Args:
        replicas: those of this gateway.
        unused: statuses of the others, as far as they are known.
    """
    fleet = services.fleet
    response = admin_pb2.GetStatusResponse() if fleet is None else fleet.describe()
    described = {replica.replica_id: replica for replica in response.replicas}
    for replica in replicas:
        known = described.get(replica.replica_id)
        if known is None:
            response.replicas.append(replica)
        else:
            known.MergeFrom(replica)
    for replica_id in (name for pool in _pools(services) for name in pool.unused_ids if name in described):
        status = (unused or {}).get(replica_id)
        if status is None:
            described[replica_id].ready = True
        else:
            described[replica_id].MergeFrom(replica_to_message(status, status.problem))
    response.traffic.extend(_traffic(services, model) for model in services.models)
    return response


async def _ask(pool: ReplicaPool, replica_id: str) -> admin_pb2.Replica:
    """Return the replica's status; if the replica does not answer, a message that names the problem."""
    client = pool.clients.get(replica_id)
    if client is None:  # removed since its id was listed
        return admin_pb2.Replica(replica_id=replica_id, model=pool.model, problem="it has just ended")
    try:
        await client.status(STATUS_TIMEOUT_S)
    except ReplicaUnavailable as error:
        return _describe(pool, replica_id, client, str(error))
    return _describe(pool, replica_id, client)


def _describe(
    pool: ReplicaPool, replica_id: str, client: ReplicaClient, no_answer: str = ""
) -> admin_pb2.Replica:
    """Return the latest status of a replica.

    Args:
        no_answer: why there is no newer one.
    """
    status = client.latest_status
    problem = client.problem or no_answer or pool.why_unavailable(replica_id)
    if status is None:
        return admin_pb2.Replica(
            replica_id=replica_id, model=pool.model, problem=problem, silence_s=client.silence_s
        )
    return replica_to_message(status, problem or status.problem, client.silence_s, client.status_age_s)


def _traffic(services: GatewayServices, model: ServedModel) -> admin_pb2.ModelTraffic:
    recent = services.monitor.recent
    return to_message(
        admin_pb2.ModelTraffic,
        recent.of(model.name),
        num_unplaced=model.pool.num_waiting,
        generated_tokens_per_s_history=recent.generated_tokens_per_s(model.name),
    )


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
        present, known = _objects(_compose(self._services, _latest(self._services))), self._known
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


def current_load(models: ServedModels) -> admin_pb2.GetLoadResponse:
    """Return the load of each model: of the replicas that this gateway uses. Never waits."""
    return admin_pb2.GetLoadResponse(models=map(_load_of, models))


def _load_of(model: ServedModel) -> admin_pb2.ModelLoad:
    pool = model.pool
    statuses = [
        client.latest_status
        for replica_id, client in pool.clients.items()
        if not pool.why_unavailable(replica_id) and client.latest_status is not None
    ]
    return admin_pb2.ModelLoad(
        model=model.name,
        num_ready_replicas=len(statuses),
        num_running=sum(status.num_running for status in statuses),
        num_waiting=sum(status.num_waiting for status in statuses),
        num_unplaced=pool.num_waiting,
        num_queued_tokens=sum(status.queued_tokens for status in statuses),
        kv_use=fmean(each.kv_use for each in statuses) if statuses else 0.0,
        tokens_per_s=sum(status.tokens_per_s for status in statuses),
        queue_delay_s=pool.queue_delay_s,
        fullest_kv_use=max((max(each.kv_use, each.fullest_kv_use) for each in statuses), default=0.0),
    )
