"""Probes: liveness by the steps of a replica with work, readiness by a token that came through lately."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import small_config
from local_server import local_server
from serving import DEADLINE_S, eventually

from quire.cluster.fleet.replica.client import SILENCE_MARGIN_S, UNANSWERED_S
from quire.cluster.gateway.http.probes import PROOF_S, Probes, load_of
from quire.proto.errors import ReplicaUnavailable
from quire.proto.replica_status import Activity


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_replica_with_work_and_without_steps_is_not_alive() -> None:
    clock = Clock(0.0)
    status = SimpleNamespace(
        num_running=1, num_waiting=2, num_steps=5, kv_use=0.5, fullest_kv_use=0.75, queued_tokens=7,
        activity=Activity.BUSY, is_paused=False, sleep_level=0,
    )  # fmt: skip
    client = SimpleNamespace(replica_id="replica-0", has_failed=False, problem="", latest_status=status)
    pool = SimpleNamespace(clients={"replica-0": client})
    model: Any = SimpleNamespace(name="tiny", config=small_config(), pool=pool)
    models: Any = [model]
    probes = Probes(models, clock)
    limit_s = model.config.scheduler.step_timeout_s + SILENCE_MARGIN_S
    for _ in range(3):  # steps move
        probes.check_alive()
        clock.now += limit_s + 1
        status.num_steps += 1
    probes.check_alive()
    clock.now += limit_s - 1
    probes.check_alive()
    clock.now += 2
    with pytest.raises(ReplicaUnavailable, match="1 running and 2 waiting sequences, but no step for"):
        probes.check_alive()
    load = load_of(model)
    assert load["num_requests_waiting"] == 2
    assert (load["kv_cache_usage"], load["kv_cache_fullest_usage"]) == (0.5, 0.75)
    status.activity = Activity.RECOVERING  # it recovers by itself, or gives up
    probes.check_alive()
    status.activity = Activity.BUSY
    status.num_running = status.num_waiting = 0
    for _ in range(3):  # nothing to do
        probes.check_alive()
        clock.now += limit_s + 1
    client.has_failed, client.problem = True, "it burned"
    with pytest.raises(ReplicaUnavailable, match="it burned"):
        probes.check_alive()


async def test_readiness_is_answered_while_the_canary_waits(make_model: Callable[..., Path]) -> None:
    async with local_server(make_model("llama")) as server:
        clock = Clock(server.replica.proved_at + PROOF_S + 1)
        probes = Probes(server.models, clock)

        async def is_idle() -> bool:
            return (await server.replica.next_status(DEADLINE_S)).activity is Activity.IDLE

        await eventually(is_idle)  # a replica that was busy a moment ago counts as ready
        server.brake.hold()
        for _ in range(2):
            with pytest.raises(ReplicaUnavailable, match=r"no token has come for .* its canary waits"):
                await probes.check_ready()
        server.brake.release()

        async def is_ready() -> bool:
            try:
                await probes.check_ready()
            except ReplicaUnavailable:
                return False
            return True

        await eventually(is_ready)


async def test_replica_with_a_long_step_is_ready_while_it_answers() -> None:
    status = SimpleNamespace(activity=Activity.PREFILL, activity_s=5.0)
    client: Any = SimpleNamespace(
        replica_id="replica-0", latest_status=status, silence_s=0.1, proved_at=-math.inf
    )
    probes = Probes([], Clock(0.0))  # type: ignore[arg-type]
    probes._check_steps(client)
    client.silence_s = UNANSWERED_S + 1
    with pytest.raises(ReplicaUnavailable, match=r"no token has come yet.* prefill for 5.0 s.* 4.0 s ago"):
        probes._check_steps(client)
    client.silence_s, status.activity = 0.1, Activity.LATE
    with pytest.raises(ReplicaUnavailable, match="late for 5"):
        probes._check_steps(client)


async def test_readiness_runs_one_canary_when_the_last_token_is_old(make_model: Callable[..., Path]) -> None:
    async with local_server(make_model("llama")) as server:
        clock = Clock(server.replica.proved_at + PROOF_S - 1)
        probes = Probes(server.models, clock)
        num_steps = len(server.brake.steps)
        await probes.check_ready()
        assert len(server.brake.steps) == num_steps, "a recent token needs no canary"
        clock.now += 2
        proved_at = server.replica.proved_at
        await asyncio.gather(*(probes.check_ready() for _ in range(5)))
        assert server.replica.proved_at > proved_at
        num_prompts = sum(len(step.new) for step in server.brake.steps[num_steps:])
        assert num_prompts == 1, "concurrent probes share one canary"


async def test_server_whose_replica_failed_is_not_ready(make_model: Callable[..., Path]) -> None:
    async with local_server(make_model("llama")) as server:
        server.replica.fail("it burned")
        with pytest.raises(ReplicaUnavailable, match="no replica of tiny is ready"):
            await Probes(server.models).check_ready()
