"""Operators' commands to all replicas of a model: pause, resume, sleep, wake up, and other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ....proto.engine_command import COMMAND_TIMEOUT_S, Action, EngineCommand, PauseMode
from ....proto.errors import InvalidRequest, ReplicaUnavailable
from ...client.wire.engine_messages import read_tags
from ...fleet.replica.client import ReplicaClient
from ...text.requests.json_values import check_text
from ..routing.replica_pool import ReplicaPool
from ..routing.weights_registry import new_timestamp

MAX_VERSION_CHARS = 256
MAX_PATH_CHARS = 4096
# For the replicas to report their new state; a busy scheduler answers within 0.1 s.
STATUS_TIMEOUT_S = 10.0


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


def is_sleeping(pool: ReplicaPool) -> bool:
    """Return whether a replica sleeps."""
    return any(status.sleep_level > 0 for status in pool.statuses)


def is_paused(pool: ReplicaPool) -> bool:
    """Return whether a replica is paused."""
    return any(status.is_paused for status in pool.statuses)
