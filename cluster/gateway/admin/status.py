"""The state of a gateway's replicas and traffic, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ....proto import admin_pb2
from ....proto.block_map import BlockMap
from ....proto.errors import InvalidRequest, ReplicaUnavailable
from ...client.wire.status_messages import replica_to_message
from ...fleet.replica.client import ReplicaClient
from ..metrics.recent_traffic import Latency
from ..routing.replica_pool import ReplicaPool
from ..routing.served_models import ServedModel
from .services import GatewayServices

# A replica answers within 0.1 s whatever its ranks do; one that does not is shown by its latest status.
STATUS_TIMEOUT_S = 0.4


async def current_status(services: GatewayServices) -> admin_pb2.GetStatusResponse:
    """Return the state; every replica is asked for its own, within STATUS_TIMEOUT_S."""
    queries = [_ask(pool, replica_id) for pool in _pools(services) for replica_id in pool.clients]
    return _compose(services, await asyncio.gather(*queries))


def latest_status(services: GatewayServices) -> admin_pb2.GetStatusResponse:
    """Return the state with the latest status of each replica. Never waits."""
    known = [
        _describe(pool, replica_id, client)
        for pool in _pools(services)
        for replica_id, client in pool.clients.items()
    ]
    return _compose(services, known)


async def block_map(services: GatewayServices, replica_id: str, timeout_s: float) -> BlockMap:
    """Return the map of a replica's KV blocks.

    Raises:
        InvalidRequest: this gateway has no such replica.
        ReplicaUnavailable: the replica does not answer in time.
    """
    for pool in _pools(services):
        client = pool.clients.get(replica_id)
        if client is not None:
            return await client.block_map(timeout_s)
    raise InvalidRequest("replica_id", f"is {replica_id!r}, which is no replica of this server")


def _pools(services: GatewayServices) -> list[ReplicaPool]:
    return [model.pool for model in services.models]


def _compose(services: GatewayServices, replicas: Iterable[admin_pb2.Replica]) -> admin_pb2.GetStatusResponse:
    """Return the fleet's state, if there is a fleet, with the replicas and the traffic added."""
    fleet = services.fleet
    response = admin_pb2.GetStatusResponse() if fleet is None else fleet.describe()
    described = {replica.replica_id: replica for replica in response.replicas}
    for replica in replicas:
        known = described.get(replica.replica_id)
        if known is None:
            response.replicas.append(replica)
        else:
            known.MergeFrom(replica)
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
    return replica_to_message(status, problem or status.problem, client.silence_s)


def _traffic(services: GatewayServices, model: ServedModel) -> admin_pb2.ModelTraffic:
    recent = services.monitor.recent
    traffic = recent.of(model.name)
    return admin_pb2.ModelTraffic(
        model=model.name,
        seconds=traffic.seconds,
        num_open=traffic.num_open,
        num_unplaced=model.pool.num_waiting,
        prompt_tokens_per_s=traffic.prompt_tokens_per_s,
        generated_tokens_per_s=traffic.generated_tokens_per_s,
        completions_per_s=traffic.completions_per_s,
        errors_per_s=traffic.errors_per_s,
        first_token=_latency(traffic.first_token),
        inter_token=_latency(traffic.inter_token),
        generated_tokens_per_s_history=recent.generated_tokens_per_s(model.name),
    )


def _latency(latency: Latency) -> admin_pb2.LatencyQuantiles:
    return admin_pb2.LatencyQuantiles(p50_s=latency.p50, p99_s=latency.p99)
