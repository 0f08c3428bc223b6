"""Reconciliation of one model's replicas with its target: `plan`, a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .fleet_state import ReplicaState

# Replicas above the target that a rolling update may start.
SURGE = 1
# After a starting replica has waited this long for room, a replica that it will replace drains to make room.
ROOM_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as seen by `plan`.

    Attributes:
        version: version of the deployment that the replica was started for.
        started_at: when its launch began.
        num_requests: number of requests that it runs or queues.
        drain_by: when the replica must drain at the latest, because its node departs or an operator drains it; None
            if it may stay.
        is_adopted: an earlier controller launched it; it may run requests although it is not ready here yet.
        no_room_since: time at which the replica began to wait for room; None if it does not wait.
    """

    replica_id: str
    version: str
    state: ReplicaState
    started_at: float
    num_requests: int = 0
    drain_by: float | None = None
    no_room_since: float | None = None
    is_adopted: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions to carry out now.

    Attributes:
        num_starts: replicas of the wanted version to start.
        drain: ready replicas to drain and then end.
        stop: starting replicas to end.
    """

    num_starts: int = 0
    drain: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def plan(target: int, version: str, replicas: Sequence[ReplicaView], now: float) -> Plan:
    """Return the next actions towards `target` replicas of the version.

    Replicas of another version drain once `target` other replicas are ready. Departing replicas, those with a
    `drain_by`, drain before them: once any other replica is ready, or at `drain_by`. If a starting replica lacks room
    for ROOM_PATIENCE_S, an outgoing replica drains to make room. Adopted replicas are never stopped: they drain when
    they are ready.
    """
    live = [each for each in replicas if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
    staying, outgoing = list[ReplicaView](), list[ReplicaView]()
    for each in live:
        (staying if each.version == version and each.drain_by is None else outgoing).append(each)
    departing = [each for each in outgoing if each.drain_by is not None]
    surplus = max(0, len(staying) - target)
    stop = [each for each in outgoing if _is_launching(each)]
    stop += _newest_first([each for each in staying if _is_launching(each)])[:surplus]
    room = target + max(SURGE, len(departing)) - (len(live) - len(stop))
    return Plan(
        num_starts=max(0, min(target - len(staying), room)),
        drain=_ids(_to_drain(target, staying, outgoing, now)),
        stop=_ids(stop),
    )


def _to_drain(
    target: int, staying: Sequence[ReplicaView], outgoing: Sequence[ReplicaView], now: float
) -> list[ReplicaView]:
    ready_staying = _least_busy_first([each for each in staying if each.state is ReplicaState.READY])
    ready_outgoing = _least_busy_first([each for each in outgoing if each.state is ReplicaState.READY])
    ready_outgoing.sort(key=lambda each: each.drain_by is None)  # departing ones first
    num_surplus = max(0, len(ready_staying) + len(ready_outgoing) - target)
    drain = ready_outgoing[:num_surplus]
    num_surplus -= len(drain)
    drain += ready_staying[:num_surplus]
    for each in ready_outgoing[len(drain) :]:
        others_are_ready = len(ready_staying) + len(ready_outgoing) - len(drain) > 1
        if each.drain_by is not None and (others_are_ready or now >= each.drain_by):
            drain.append(each)
    if not drain and ready_outgoing and _lacks_room(staying, now):
        drain.append(ready_outgoing[0])
    return drain


def _is_launching(replica: ReplicaView) -> bool:
    return replica.state is ReplicaState.STARTING and not replica.is_adopted


def _lacks_room(staying: Sequence[ReplicaView], now: float) -> bool:
    return any(
        each.state is ReplicaState.STARTING
        and each.no_room_since is not None
        and now - each.no_room_since >= ROOM_PATIENCE_S
        for each in staying
    )


def _least_busy_first(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    return sorted(replicas, key=lambda each: (each.num_requests, -each.started_at))


def _newest_first(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    return sorted(replicas, key=lambda each: -each.started_at)


def _ids(replicas: Sequence[ReplicaView]) -> tuple[str, ...]:
    return tuple(each.replica_id for each in replicas)
