"""Probes: progress of the replicas of a gateway, and recent tokens that came through all their ranks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ....proto.errors import ReplicaUnavailable
from ....proto.replica_status import Activity, ReplicaStatus
from ...fleet.replica.canary import run_canary
from ...fleet.replica.client import SILENCE_MARGIN_S, UNANSWERED_S, ReplicaClient
from ..routing.served_models import ServedModel, ServedModels

# A token that came through all ranks proves for this long that requests are served.
PROOF_S = 30.0
CANARY_TIMEOUT_S = 10.0
# A probe is answered after this time, whatever the replica does. Kubernetes waits 1 s for one by default.
READY_WAIT_S = 0.3


@dataclass(slots=True)
class _Progress:
    """Steps that a replica with work had done when its count last changed, or when it last had no work."""

    num_steps: int
    since: float


class Probes:
    """Answers the probes of load balancers and supervisors. For one event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, models: ServedModels, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._clock = clock
        self._progress: dict[str, _Progress] = {}
        self._canaries: dict[str, asyncio.Task[None]] = {}

    def check_alive(self) -> None:
        """Raises ReplicaUnavailable if a replica has failed, or has work and no steps; a restart may cure that.

        For a gateway's own replica: the controller of a fleet replaces its replicas itself. A long prefill is many
        steps, and a step has the deadline `step_timeout_s`, after which its replica fails by itself.
        """
        for model in self._models:
            limit_s = model.config.scheduler.step_timeout_s + SILENCE_MARGIN_S
            for client in model.pool.clients.values():
                self._check_progress(client, limit_s)

    async def check_ready(self) -> None:
        """Raises ReplicaUnavailable unless a request to each model would be served.

        Runs a canary request, shared by concurrent probes, if no token has come through all ranks lately.
        """
        models = list(self._models)
        if not models:
            raise ReplicaUnavailable("no model is served yet")
        for model in models:
            await self._check_model(model)

    def _check_progress(self, client: ReplicaClient, limit_s: float) -> None:
        if client.has_failed:
            raise ReplicaUnavailable(client.problem)
        status, now = client.latest_status, self._clock()
        if status is None:
            return
        known = self._progress.get(client.replica_id)
        has_work = status.num_running + status.num_waiting > 0
        is_recovering = status.activity is Activity.RECOVERING  # with bounded attempts
        is_held = status.is_paused or status.sleep_level > 0  # by an operator
        if known is None or not has_work or is_recovering or is_held or known.num_steps != status.num_steps:
            self._progress[client.replica_id] = _Progress(status.num_steps, now)
        elif now - known.since > limit_s:
            raise ReplicaUnavailable(
                f"{client.replica_id} has {status.num_running} running and {status.num_waiting} waiting sequences, "
                f"but no step for {now - known.since:.0f} s"
            )

    async def _check_model(self, model: ServedModel) -> None:
        if not model.is_ready:
            raise ReplicaUnavailable(f"no replica of {model.name} is ready")
        pool = model.pool
        clients = [client for each, client in pool.clients.items() if not pool.why_unavailable(each)]
        if not clients:  # scales from zero
            return
        if any(self._clock() - client.proved_at <= PROOF_S for client in clients):
            return
        canary = self._canary(clients[0])
        await asyncio.wait((canary,), timeout=READY_WAIT_S)
        if not canary.done():
            self._check_steps(clients[0])
        elif (error := canary.exception()) is not None:
            raise ReplicaUnavailable(f"the canary of {clients[0].replica_id} failed: {error}") from error

    def _check_steps(self, client: ReplicaClient) -> None:
        """Raises ReplicaUnavailable unless the replica, whose canary waits, computes a step of an expected length."""
        status = client.latest_status
        is_busy = status is not None and status.activity in (Activity.BUSY, Activity.PREFILL)
        if is_busy and client.silence_s <= UNANSWERED_S:
            return
        since_s = self._clock() - client.proved_at
        waited = "no token has come yet" if math.isinf(since_s) else f"no token has come for {since_s:.1f} s"
        doing = "unknown" if status is None else f"{status.activity} for {status.activity_s:.1f} s"
        raise ReplicaUnavailable(
            f"{client.replica_id}: {waited}, and its canary waits; the replica is {doing}, and was last heard from "
            f"{client.silence_s:.1f} s ago"
        )

    def _canary(self, client: ReplicaClient) -> asyncio.Task[None]:
        """Return the canary that runs now, or start one."""
        running = self._canaries.get(client.replica_id)
        if running is None:
            running = asyncio.create_task(run_canary(client, CANARY_TIMEOUT_S))
            self._canaries[client.replica_id] = running
            running.add_done_callback(lambda task: self._on_canary_done(client.replica_id, task))
        return running

    def _on_canary_done(self, replica_id: str, task: asyncio.Task[None]) -> None:
        del self._canaries[replica_id]
        if not task.cancelled():
            task.exception()  # every probe that waited may have left


def load_of(model: ServedModel) -> dict[str, object]:
    """Return the requests and the KV memory in use of a model's replicas, from their latest statuses."""
    found = [client.latest_status for client in model.pool.clients.values()]
    statuses: list[ReplicaStatus] = [status for status in found if status is not None]
    return {
        "model": model.name,
        "num_replicas": len(statuses),
        "num_requests_running": sum(status.num_running for status in statuses),
        "num_requests_waiting": sum(status.num_waiting for status in statuses),
        "kv_cache_usage": max((status.kv_use for status in statuses), default=0.0),
        "kv_cache_fullest_usage": max(
            (max(status.kv_use, status.fullest_kv_use) for status in statuses), default=0.0
        ),
        "queued_tokens": sum(status.queued_tokens for status in statuses),
    }
