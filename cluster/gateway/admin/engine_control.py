"""Operators' commands to replicas: pause, resume, sleep, wake up, other weights, and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from ....proto import admin_pb2
from ....proto.engine_command import COMMAND_TIMEOUT_S, Action, EngineCommand
from ....proto.errors import ConfigError, InvalidRequest, ReplicaUnavailable
from ....proto.faults import SIGNALS, Fault, FaultKind
from ....proto.stream import FlushCache
from ...fleet.replica.client import ReplicaClient
from ..routing.registries import new_timestamp
from ..routing.replica_pool import ReplicaPool
from .services import GatewayServices

# For the replicas to report their new state; a busy scheduler answers within 0.1 s.
STATUS_TIMEOUT_S = 10.0

_KINDS = {
    admin_pb2.FAULT_KIND_KILL: FaultKind.KILL,
    admin_pb2.FAULT_KIND_STOP: FaultKind.STOP,
    admin_pb2.FAULT_KIND_EXCEPTION: FaultKind.EXCEPTION,
    admin_pb2.FAULT_KIND_SLOW: FaultKind.SLOW,
    admin_pb2.FAULT_KIND_POISON: FaultKind.POISON,
}


async def control_replicas(pool: ReplicaPool, command: EngineCommand) -> None:
    """Have all replicas of a model carry out a command, and wait until they have.

    Replicas that could not load other weights get no requests until they have loaded them.

    Raises:
        InvalidRequest: a replica refused; says why. Other replicas may have carried out the command.
        ReplicaUnavailable: there is no replica, or one did not answer.
    """
    if command.action is Action.UPDATE_WEIGHTS:
        command = replace(command, timestamp=new_timestamp(after=pool.weights.timestamp))
    async with pool.reach() as reached:
        if not reached:
            raise ReplicaUnavailable(f"no replica of {pool.model} runs")
        results = await asyncio.gather(
            *(client.control(command, COMMAND_TIMEOUT_S) for client in reached.values()),
            return_exceptions=True,
        )
    errors = [result for result in results if isinstance(result, BaseException)]
    if command.action is Action.UPDATE_WEIGHTS and len(errors) < len(results):
        pool.weights.on_update(command)
    await _refresh(pool.clients.values())
    if errors:
        raise errors[0]


async def _refresh(clients: Iterable[ReplicaClient]) -> None:
    """Fetch the statuses of replicas, by which the pool knows whether they take requests."""
    queries = (client.status(STATUS_TIMEOUT_S) for client in clients)
    await asyncio.gather(*queries, return_exceptions=True)


async def flush_caches(pool: ReplicaPool) -> list[str]:
    """Have all replicas of a model forget the cached prefixes; return their ids."""
    async with pool.reach() as reached:
        for client in reached.values():
            client.send(FlushCache())
        return list(reached)


def is_sleeping(pool: ReplicaPool) -> bool:
    """Return whether a replica sleeps."""
    return any(status.sleep_level > 0 for status in pool.statuses)


def is_paused(pool: ReplicaPool) -> bool:
    """Return whether a replica is paused."""
    return any(status.is_paused for status in pool.statuses)


async def inject_fault(
    services: GatewayServices, message: admin_pb2.InjectFaultRequest
) -> admin_pb2.InjectFaultResponse:
    """Cause the fault that an operator asks for.

    Raises:
        ConfigError: the server does not permit faults.
        InvalidRequest: no such replica or process, or the process cannot have such a fault.
        ReplicaUnavailable: the process does not run or does not answer.
    """
    if services.faults is None:
        raise ConfigError("this server permits no faults; start it with --enable-chaos for a game day")
    rank = message.rank if message.HasField("rank") else None
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidRequest("kind", f"is {message.kind}, which is no kind of fault")
    if rank is None and kind not in SIGNALS:
        raise InvalidRequest(
            "kind", f"is {kind}, which only ranks have; a scheduler can be killed or stopped"
        )
    fault = Fault(kind, message.delay_s, message.duration_s, message.token_id)
    replica_id = _find_replica(services, message.replica_id)
    pid = await services.faults.inject(replica_id, rank, fault)
    return admin_pb2.InjectFaultResponse(replica_id=replica_id, pid=pid)


def _find_replica(services: GatewayServices, prefix: str) -> str:
    pools = [model.pool for model in services.models]
    known = sorted(replica_id for pool in pools for replica_id in (*pool.clients, *pool.unused_ids))
    found = [prefix] if prefix in known else [each for each in known if each.startswith(prefix)]
    if len(found) != 1:
        problem = "which is no replica" if not found else "which several replicas have"
        raise InvalidRequest(
            "replica_id", f"is {prefix!r}, {problem}; there are {', '.join(known) or 'none'}"
        )
    return found[0]
