"""ReplicaPool with real step loops: requests keep their outputs while replicas come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_fleet import FakeLauncher, FakeReplica, SlowWorkers
from fakes import beam_oracle, oracle

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.fleet_state import Demand
from quire.cluster.fleet.replica.canary import run_canary
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.routing import replica_pool
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.gateway.routing.request_migration import MAX_FAILED_REPLICAS, MigratingRequest
from quire.cluster.text.requests.request import Request
from quire.proto.errors import DeadlineExpired, Overloaded, RankFailed, ReplicaUnavailable, RequestAborted
from quire.proto.replica_status import ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Drain, Finish, FinishReason

DEADLINE_S = 60.0
PROMPT = list(range(2, 40))
# Enough tokens for a replica to change while the request runs: 20 s at a slow replica, on a busy machine too.
NUM_TOKENS = 200
SLOW_STEP_S = 0.1
LONG = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=1)
EXPECTED = oracle(PROMPT, NUM_TOKENS, stops=())


class Fleet:
    """A pool and its replicas."""

    def __init__(self, launcher: FakeLauncher, **options: Any) -> None:
        self._launcher = launcher
        self.pool = ReplicaPool("fake", 16, **options)
        self.replicas: dict[str, FakeReplica] = {}

    def add(self, replica_id: str) -> None:
        deployment = Deployment.from_table({"model": "demo"})
        replica = self._launcher.launch(deployment, replica_id, lambda progress: None)
        self.replicas[replica_id] = replica
        client = self._launcher.connect(replica.record)
        client.start()
        self.pool.add(client)

    async def ready(self, *replica_ids: str) -> None:
        for replica_id in replica_ids:
            self.add(replica_id)
        async with asyncio.timeout(DEADLINE_S):
            while not all(self.pool.why_unavailable(replica_id) == "" for replica_id in replica_ids):
                await asyncio.sleep(0.01)

    def slow_down(self, *replica_ids: str) -> None:
        """Let the steps of these replicas take so long that a test can interfere."""
        for replica_id in replica_ids:
            self.replicas[replica_id].group.step_s = SLOW_STEP_S

    def submit_at_slow_replica(self, request: Request) -> tuple[MigratingRequest, str]:
        """Submit a request; return it and its replica, which alone is slow from then on."""
        self.slow_down(*self.replicas)
        running, busy = self.submit(request)
        for replica_id, replica in self.replicas.items():
            if replica_id != busy:
                replica.group.step_s = SlowWorkers.step_s
        return running, busy

    def submit(self, request: Request) -> tuple[MigratingRequest, str]:
        """Submit a request; return it and the id of its replica. Others may run a canary."""
        before = {name: client.num_running for name, client in self.pool.clients.items()}
        running = self.pool.submit(request)
        (name,) = [name for name, client in self.pool.clients.items() if client.num_running > before[name]]
        return running, name

    async def until_cache_is_known(self, replica_id: str) -> None:
        """Wait for the report of a replica's whole cache: one on its way drops what was sent to it meanwhile."""
        # The first status has the pool ask for a report, which comes before the second one.
        for _ in range(2):
            await self.pool.clients[replica_id].status(DEADLINE_S)

    def drain(self, replica_id: str, grace_s: float = 0.0) -> None:
        self.pool.clients[replica_id].send(Drain(grace_s))


@asynccontextmanager
async def fleet_of(launcher: FakeLauncher, **options: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(launcher, **options)
    try:
        yield fleet
    finally:
        await fleet.pool.close()


@pytest.fixture
def fleet(launcher: FakeLauncher) -> AbstractAsyncContextManager[Fleet]:
    return fleet_of(launcher)


def request(params: SamplingParams = LONG, **more: Any) -> Request:
    return Request("mine", np.array(PROMPT, np.int32), params, **more)


async def follow(
    running: MigratingRequest, num_outputs: int = 1, after: dict[int, Callable[[], None]] | None = None
) -> tuple[list[list[int]], list[Finish]]:
    """Return tokens and finish of each output.

    Args:
        after: number of tokens of the first output |-> a function to call then.
    """
    events = dict(after or {})
    tokens: list[list[int]] = [[] for _ in range(num_outputs)]
    ends: dict[int, Finish] = {}
    async for index, update in running:
        tokens[index] += update.token_ids
        for count in [count for count in events if len(tokens[0]) >= count]:
            events.pop(count)()
        if update.finish is not None:
            assert index not in ends
            ends[index] = update.finish
    assert not events, "the first output ended before every event"
    return tokens, [ends[index] for index in range(num_outputs)]


async def test_request_resumes_after_its_replica_drained(fleet: Fleet) -> None:
    await fleet.ready("a", "b")
    running, first = fleet.submit_at_slow_replica(request())
    (tokens,), (finish,) = await follow(running, after={3: lambda: fleet.drain(first)})
    assert tokens == EXPECTED
    assert finish.reason is FinishReason.LENGTH
    assert finish.num_completion_tokens == NUM_TOKENS
    assert finish.timings.num_moves == 1
    assert finish.timings.decode_s > 0
    # New requests do not go to the draining replica.
    (tokens,), (finish,) = await follow(fleet.pool.submit(request()))
    assert tokens == EXPECTED
    assert finish.timings.num_moves == 0


async def test_request_resumes_after_its_replica_failed(fleet: Fleet) -> None:
    await fleet.ready("a", "b")
    running, first = fleet.submit_at_slow_replica(request())
    (tokens,), (finish,) = await follow(
        running, after={3: lambda: fleet.replicas[first].kill("rank 0 was killed")}
    )
    assert tokens == EXPECTED
    assert finish.timings.num_moves == 1


@pytest.mark.parametrize("how", ["drain", "kill"])
@pytest.mark.parametrize("options", [{"n": 3}, {"n": 1, "best_of": 3}])
async def test_outputs_of_one_request_move_separately(
    fleet: Fleet, options: dict[str, Any], how: str
) -> None:
    await fleet.ready("a", "b")
    running, first = fleet.submit_at_slow_replica(
        request(SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=4, **options))
    )
    events = {
        "drain": lambda: fleet.drain(first),
        "kill": lambda: fleet.replicas[first].kill("rank 0 was killed"),
    }
    tokens, ends = await follow(running, 3, after={3: events[how]})
    assert tokens == [EXPECTED] * 3
    assert all(finish.timings.num_moves == 1 for finish in ends)


async def test_beam_search_restarts_at_another_replica(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=12, beam_width=3, n=2, ignore_eos=True, seed=0)
    expected = beam_oracle(PROMPT, 12, width=3, n=2, stops=())
    await fleet.ready("a", "b")
    running, first = fleet.submit_at_slow_replica(request(params))
    fleet.drain(first)
    tokens, ends = await follow(running, params.num_sequences)
    assert tokens[:2] == expected
    assert all(finish.timings.num_moves == 1 for finish in ends[:2])


async def test_many_requests_survive_replica_changes(fleet: Fleet) -> None:
    await fleet.ready("r0", "r1")
    fleet.replicas["r0"].group.step_s = 0.5  # its requests then run or wait when it drains
    brief, expected = replace(LONG, max_tokens=60), EXPECTED[:60]

    def submit(count: int) -> list[asyncio.Future[Any]]:
        return [asyncio.ensure_future(follow(fleet.pool.submit(request(brief)))) for _ in range(count)]

    tasks = submit(40)
    for number in range(2, 6):
        await fleet.ready(f"r{number}")
        leaving = f"r{number - 2}"
        if number % 2:
            fleet.replicas[leaving].kill("rank 0 was killed")
        else:
            fleet.drain(leaving, grace_s=0.05)
        # Its removal would count as a failure of each request that is still there.
        while fleet.pool.clients[leaving].num_running:
            await asyncio.sleep(0.01)
        fleet.pool.remove(leaving, "it was ended")
        tasks += submit(10)
    results = await asyncio.gather(*tasks)
    assert len(results) == 80
    assert all(tokens == [expected] for tokens, _ in results)
    assert any(ends[0].timings.num_moves for _, ends in results)


async def test_requests_wait_for_a_replica_and_count_as_demand(launcher: FakeLauncher) -> None:
    calls: list[bool] = []

    async with fleet_of(launcher, max_waiting=1, on_demand=lambda: calls.append(True)) as fleet:
        running = fleet.pool.submit(request())
        await asyncio.sleep(0)
        assert calls == [True]
        assert fleet.pool.collect_demand() == Demand(1, len(PROMPT), 1, len(PROMPT))
        assert fleet.pool.collect_demand() == Demand(0, 0, 1, len(PROMPT))
        with pytest.raises(Overloaded, match="1 requests wait for one already"):
            fleet.pool.submit(request())
        await fleet.ready("a")
        (tokens,), (finish,) = await follow(running)
        assert tokens == EXPECTED
        assert finish.timings.queued_s > 0
        assert finish.timings.num_moves == 0
        assert fleet.pool.collect_demand() == Demand(1, len(PROMPT))


async def test_request_without_a_replica_fails_with_the_reason(launcher: FakeLauncher) -> None:
    async with fleet_of(launcher, max_wait_s=0.05, explain_unavailable=lambda: "no GPU is left") as fleet:
        with pytest.raises(ReplicaUnavailable, match="no replica of fake was ready in 0 s: no GPU is left"):
            await follow(fleet.pool.submit(request()))
        aborted = fleet.pool.submit(request())
        aborted.end(RequestAborted("by the test"))
        with pytest.raises(RequestAborted):
            await follow(aborted)
        assert fleet.pool.collect_demand().num_waiting == 0


async def test_deadline_applies_while_a_request_waits(fleet: Fleet) -> None:
    with pytest.raises((ReplicaUnavailable, DeadlineExpired)):
        await follow(fleet.pool.submit(request(timeout_s=0.05)))


async def test_request_fails_after_too_many_failed_replicas(fleet: Fleet) -> None:
    names = [f"r{number}" for number in range(MAX_FAILED_REPLICAS + 1)]
    await fleet.ready(*names)
    fleet.slow_down(*names)
    task = asyncio.ensure_future(follow(fleet.pool.submit(request())))
    killed: set[str] = set()
    while not task.done():
        for name in {name for name, client in fleet.pool.clients.items() if client.num_running} - killed:
            fleet.replicas[name].kill("out of memory")
            killed.add(name)
        await asyncio.sleep(0)
    with pytest.raises(
        ReplicaUnavailable,
        match=f"{MAX_FAILED_REPLICAS} replicas failed while running this request.*out of memory",
    ):
        await task
    assert len(killed) == MAX_FAILED_REPLICAS


async def test_output_stopped_between_replicas_finishes(fleet: Fleet) -> None:
    await fleet.ready("a")
    running, _ = fleet.submit_at_slow_replica(request())
    tokens: list[int] = []
    async for _, update in running:
        tokens += update.token_ids
        if update.finish is not None:
            break
        if len(tokens) >= 5:
            fleet.pool.remove("a", "it was ended")  # the request has no replica from here on
            await asyncio.sleep(0.05)
            running.stop(0)
            running.stop(0)
    assert update.finish is not None
    assert update.finish.reason is FinishReason.STOP
    assert update.finish.num_completion_tokens >= 5
    assert [item async for item in running] == []


async def test_request_fails_with_the_last_replica_of_a_retired_pool(fleet: Fleet) -> None:
    await fleet.ready("a")
    fleet.pool.retire()
    running, _ = fleet.submit_at_slow_replica(request())
    with pytest.raises(ReplicaUnavailable, match="rank 0 was killed"):
        await follow(running, after={3: lambda: fleet.replicas["a"].kill("rank 0 was killed")})
    with pytest.raises(ReplicaUnavailable, match="rank 0 was killed"):
        fleet.pool.submit(request())


async def test_waiting_request_fails_if_the_only_replica_fails_before_it_is_ready(
    fleet: Fleet,
) -> None:
    client = ReplicaClient("ipc:///nowhere/at-all", "a")
    client.start()
    fleet.pool.add(client)
    fleet.pool.retire()
    waiting = asyncio.ensure_future(follow(fleet.pool.submit(request())))
    await asyncio.sleep(0)
    assert fleet.pool.collect_demand().num_waiting == 1
    client.fail("its scheduler was killed")
    with pytest.raises(ReplicaUnavailable, match="a failed: its scheduler was killed"):
        await waiting


async def test_requests_with_a_common_prefix_use_the_same_replica(fleet: Fleet) -> None:
    await fleet.ready("a", "b", "c")
    for first in range(6):
        prompt = np.array([first] * 64, np.int32)
        short = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)
        chosen = set()
        for _ in range(4):
            running, replica_id = fleet.submit(Request("mine", prompt, short))
            chosen.add(replica_id)
            await follow(running)
            await fleet.until_cache_is_known(replica_id)
        assert len(chosen) == 1


async def test_requests_of_a_recovering_replica_move_to_a_ready_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.ready("a", "b")
    running, busy = fleet.submit_at_slow_replica(request())
    group = fleet.replicas[busy].group
    is_over = threading.Event()
    monkeypatch.setattr(group, "rebuild", lambda epoch: is_over.wait(DEADLINE_S))

    def lose_a_rank() -> None:
        group.error = RankFailed(1, "its process was killed by SIGKILL")

    (tokens,), (finish,) = await follow(running, after={3: lose_a_rank})
    assert tokens == EXPECTED
    assert finish.timings.num_moves == 1
    assert "the ranks are being rebuilt" in fleet.pool.clients[busy].problem
    is_over.set()


async def test_idle_replica_runs_canaries(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pool, "IDLE_CANARY_S", 0.05)
    await fleet.ready("a")
    proved_at = fleet.pool.clients["a"].proved_at
    async with asyncio.timeout(DEADLINE_S):
        while fleet.pool.clients["a"].proved_at == proved_at:
            await asyncio.sleep(0.01)
    assert fleet.pool.is_ready


async def test_idle_replica_runs_no_canary_after_one_of_another_gateway(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_pool, "IDLE_CANARY_S", 0.05)
    clock = SimpleNamespace(now=time.monotonic() + 1e6)
    canaries: list[str] = []

    async def count(client: ReplicaClient, timeout_s: float) -> None:
        canaries.append(client.replica_id)
        await run_canary(client, timeout_s)

    await fleet.ready("a")
    client, num_asked = fleet.pool.clients["a"], 0
    next_status = client.next_status

    async def prove(timeout_s: float) -> ReplicaStatus:
        """Do as if the status told of another gateway's step."""
        nonlocal num_asked
        status = await next_status(timeout_s)
        client.proved_at = clock.now
        num_asked += 1
        return status

    monkeypatch.setattr(replica_pool, "run_canary", count)
    monkeypatch.setattr(replica_pool, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(client, "next_status", prove)
    async with asyncio.timeout(DEADLINE_S):
        for number in range(20):
            clock.now += 1.0
            while num_asked == number:
                await asyncio.sleep(0.01)
    assert canaries == []
