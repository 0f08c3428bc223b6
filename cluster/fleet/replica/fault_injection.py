"""RayFaultInjector: causes faults in the processes of replicas, which it finds by their names in Ray."""

from __future__ import annotations

import asyncio

import ray
from ray.exceptions import RayError

from ....proto.errors import InvalidRequest, ReplicaUnavailable
from ....proto.faults import SIGNALS, Fault
from ..ray.errors import await_all
from .rank_lookup import actor_name, find_rank

_ANSWER_TIMEOUT_S = 5.0


class RayFaultInjector:
    """Causes faults in replicas of one Ray namespace; see gateway.fault_injection for its method."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def inject(self, replica_id: str, rank: int | None, fault: Fault) -> int:
        return await asyncio.to_thread(self._inject, replica_id, rank, fault)

    def _inject(self, replica_id: str, rank: int | None, fault: Fault) -> int:
        role = "scheduler" if rank is None else f"rank-{rank}"
        try:
            if rank is None:
                actor = ray.get_actor(actor_name(replica_id, role), self._namespace)
            else:
                actor = find_rank(replica_id, rank, self._namespace)
        except ValueError:
            raise InvalidRequest("rank", f"names {role} of {replica_id}, which does not run") from None
        except RayError as error:
            raise ReplicaUnavailable(f"Ray does not answer: {error}") from error
        name = f"{role} of {replica_id}"
        if rank is None:
            ((_, pid),) = await_all({name: actor.where.remote()}, _ANSWER_TIMEOUT_S, "answering")
        else:
            (process,) = await_all({name: actor.process.remote()}, _ANSWER_TIMEOUT_S, "answering")
            pid = process.pid
        call = actor.cause.remote(fault)
        if fault.kind not in SIGNALS:  # a process that ends or stops does not answer
            await_all({name: call}, _ANSWER_TIMEOUT_S, "answering")
        return int(pid)
