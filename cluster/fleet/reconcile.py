"""What has to be done so that a model's replicas become those that are wanted: a pure function of how they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..controller_api.fleet_state import ReplicaState

# Replicas above the target that a rolling update may have.
SURGE = 1
# A replica that has found no room for so long gets that of one which it is to take over from.
ROOM_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as `plan` sees it.

    Attributes:
        version: of the deployment that it was started for.
        since: when it was started.
        num_requests: that it has.
        leave_by: its node goes away or an operator wants it empty: when it must drain at the latest; None: it may
            stay.
        no_room_since: it waits for a place since then; None: it has one.
    """

    replica_id: str
    version: str
    state: ReplicaState
    since: float
    num_requests: int = 0
    leave_by: float | None = None
    no_room_since: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now.

    Attributes:
        num_starts: replicas of the wanted version to start.
        drain: replicas to drain and then to stop.
        stop: replicas that serve nobody yet, to be ended as they are.
    """

    num_starts: int = 0
    drain: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def plan(target: int, version: str, replicas: Sequence[ReplicaView], now: float) -> Plan:
    """The next steps towards `target` replicas of that version.

    What is on its way out (an older version, a node that goes away) drains once others have taken over: at any time
    as many as wanted are ready, if so many were. Where there is no room for both, the old make room for the new.
    """
    live = [each for each in replicas if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
    staying = [each for each in live if each.version == version and each.leave_by is None]
    outgoing = [each for each in live if each not in staying]
    leaving = [each for each in outgoing if each.leave_by is not None]
    surplus = max(0, len(staying) - target)
    stop = [each for each in outgoing if each.state is ReplicaState.STARTING]
    stop += _newest([each for each in staying if each.state is ReplicaState.STARTING])[:surplus]
    room = target + max(SURGE, len(leaving)) - (len(live) - len(stop))
    return Plan(
        num_starts=max(0, min(target - len(staying), room)),
        drain=_ids(_to_drain(target, staying, outgoing, now)),
        stop=_ids(stop),
    )


def _to_drain(
    target: int, staying: Sequence[ReplicaView], outgoing: Sequence[ReplicaView], now: float
) -> list[ReplicaView]:
    ready_staying = _least_busy([each for each in staying if each.state is ReplicaState.READY])
    ready_outgoing = _least_busy([each for each in outgoing if each.state is ReplicaState.READY])
    # Those that must leave go first.
    ready_outgoing.sort(key=lambda each: each.leave_by is None)
    num_surplus = max(0, len(ready_staying) + len(ready_outgoing) - target)
    drain = ready_outgoing[:num_surplus]
    num_surplus -= len(drain)
    drain += ready_staying[:num_surplus]
    for each in ready_outgoing[len(drain) :]:
        others_are_ready = len(ready_staying) + len(ready_outgoing) - len(drain) > 1
        if each.leave_by is not None and (others_are_ready or now >= each.leave_by):
            drain.append(each)
    if not drain and ready_outgoing and _lacks_room(staying, now):
        drain.append(ready_outgoing[0])
    return drain


def _lacks_room(staying: Sequence[ReplicaView], now: float) -> bool:
    return any(
        each.state is ReplicaState.STARTING
        and each.no_room_since is not None
        and now - each.no_room_since >= ROOM_PATIENCE_S
        for each in staying
    )


def _least_busy(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    return sorted(replicas, key=lambda each: (each.num_requests, -each.since))


def _newest(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    return sorted(replicas, key=lambda each: -each.since)


def _ids(replicas: Sequence[ReplicaView]) -> tuple[str, ...]:
    return tuple(each.replica_id for each in replicas)
