"""Operators' commands to replicas: pause, resume, sleep, wake up, other weights, and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ....proto import admin_pb2
from ....proto.engine_command import COMMAND_TIMEOUT_S, Action, EngineCommand, PauseMode
from ....proto.errors import ConfigError, InvalidRequest, ReplicaUnavailable
from ....proto.faults import SIGNALS, Fault, FaultKind
from ....proto.stream import FlushCache
from ...client.wire.admin_messages import read_tags
from ...fleet.replica.client import ReplicaClient
from ...text.requests.json_values import check_text
from ..routing.registries import new_timestamp
from ..routing.replica_pool import ReplicaPool
from .services import GatewayServices

MAX_VERSION_CHARS = 256
MAX_PATH_CHARS = 4096
# For the replicas to report their new state; a busy scheduler answers within 0.1 s.
STATUS_TIMEOUT_S = 10.0

_KINDS = {
    admin_pb2.FAULT_KIND_KILL: FaultKind.KILL,
    admin_pb2.FAULT_KIND_STOP: FaultKind.STOP,
    admin_pb2.FAULT_KIND_EXCEPTION: FaultKind.EXCEPTION,
    admin_pb2.FAULT_KIND_SLOW: FaultKind.SLOW,
    admin_pb2.FAULT_KIND_POISON: FaultKind.POISON,
}


def sleep_command(level: int, mode: PauseMode) -> EngineCommand:
    """Raises InvalidRequest if a value is not allowed."""
    if level not in (1, 2):
        raise InvalidRequest("level", f"is {level}, must be 1 or 2")
    return EngineCommand(Action.SLEEP, mode, level=level)


def wake_up_command(tags: Iterable[str]) -> EngineCommand:
    """Raises InvalidRequest for an unknown tag."""
    return EngineCommand(Action.WAKE_UP, tags=read_tags(tags))


def update_command(path: str, version: str, mode: PauseMode) -> EngineCommand:
    """Raises InvalidRequest if a value is not allowed."""
    for field, text, most in (("path", path, MAX_PATH_CHARS), ("version", version, MAX_VERSION_CHARS)):
        if not 1 <= len(text) <= most:
            raise InvalidRequest(field, f"has {len(text)} characters, must have 1 to {most}")
        check_text(field, text)
    if not Path(path).is_absolute():
        raise InvalidRequest(
            "path", f"is {path!r}, must be absolute: the ranks have working directories of their own"
        )
    return EngineCommand(Action.UPDATE_WEIGHTS, mode, path=path, version=version)


async def control_replicas(pool: ReplicaPool, command: EngineCommand) -> None:
    """Have all replicas of a model carry out a command, and wait until they have.

    Replicas that could not load other weights get no requests until they have loaded them.

    Raises:
        InvalidRequest: a replica refused; says why. Other replicas may have carried out the command.
        ReplicaUnavailable: there is no replica, or one did not answer.
    """
    clients = list(pool.clients.values())
    if not clients:
        raise ReplicaUnavailable(f"no replica of {pool.model} runs")
    if command.action is Action.UPDATE_WEIGHTS:
        command = replace(command, timestamp=new_timestamp())
    results = await asyncio.gather(
        *(client.control(command, COMMAND_TIMEOUT_S) for client in clients), return_exceptions=True
    )
    errors = [result for result in results if isinstance(result, BaseException)]
    if command.action is Action.UPDATE_WEIGHTS and len(errors) < len(clients):
        pool.weights.on_update(command)
    await _refresh(clients)
    if errors:
        raise errors[0]


async def _refresh(clients: Iterable[ReplicaClient]) -> None:
    """Fetch the statuses of replicas, by which the pool knows whether they take requests."""
    queries = (client.status(STATUS_TIMEOUT_S) for client in clients)
    await asyncio.gather(*queries, return_exceptions=True)


def flush_caches(pool: ReplicaPool) -> list[str]:
    """Have all replicas of a model forget the cached prefixes; return their ids."""
    for client in pool.clients.values():
        client.send(FlushCache())
    return list(pool.clients)


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
    known = sorted(replica_id for model in services.models for replica_id in model.pool.clients)
    found = [prefix] if prefix in known else [each for each in known if each.startswith(prefix)]
    if len(found) != 1:
        problem = "which is no replica" if not found else "which several replicas have"
        raise InvalidRequest(
            "replica_id", f"is {prefix!r}, {problem}; there are {', '.join(known) or 'none'}"
        )
    return found[0]
