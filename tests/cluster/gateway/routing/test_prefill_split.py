"""Prefill and decode apart: the cost model, and a pool of replicas with roles, of which each fails at each stage."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_fleet import FakeLauncher, FakeReplica, SlowWorkers
from fakes import oracle

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.routing.prefill_split import PromptAt, PullRate, SplitEstimate, estimate_split
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.text.requests.request import Request
from quire.proto.replica_status import ReplicaRole, ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Finish

DEADLINE_S = 60.0
STEP_S = 0.06
NUM_TOKENS = 12
FAST_NETWORK = 1e9


def at(num_uncached: int, queued: int = 0, running: int = 0, rate: float = 1000.0) -> PromptAt:
    return PromptAt(num_uncached, queued, running, rate)


def estimate(decode: PromptAt, prefill: PromptAt, pull_rate: float = FAST_NETWORK) -> SplitEstimate:
    found = estimate_split(decode, prefill, PullRate(pull_rate))
    assert found is not None
    return found


def test_idle_decode_replica_computes_prompts_itself() -> None:
    for num_tokens in (10, 1000, 100_000):
        assert not estimate(at(num_tokens), at(num_tokens)).pays


def test_long_prompt_is_split_from_a_decode_replica_that_runs_sequences() -> None:
    assert estimate(at(1000, running=8), at(1000)).pays
    assert not estimate(at(1, running=8), at(1)).pays, "the transfer takes longer"
    assert not estimate(at(1000, running=8), at(1000), pull_rate=100.0).pays, "the network is slow"
    assert not estimate(at(1000, running=1), at(1000, queued=5000)).pays, (
        "prompts wait at the prefill replica"
    )


def test_prompts_that_delay_nobody_are_not_split() -> None:
    status = ReplicaStatus("d", "m", query_id=0, num_running=8, prefill_tokens_per_s=1000.0)
    assert estimate(PromptAt.of(status, 0, 1000), at(1000)).pays
    assert not estimate(PromptAt.of(replace(status, prefill_delay=0.0), 0, 1000), at(1000)).pays


def test_prompts_at_a_crowded_prefill_replica_delay_those_to_come() -> None:
    crowd = ReplicaStatus("p", "m", query_id=0, num_waiting=6, num_running=2, prefill_tokens_per_s=1000.0)
    assert not estimate(at(1000, running=8), PromptAt.of(crowd, 0, 1000)).pays


def test_prompt_that_would_wait_for_long_at_the_prefill_replica_is_not_split() -> None:
    assert estimate(at(1000, running=50), at(1000, queued=900)).pays
    assert not estimate(at(1000, running=50), at(1000, queued=1100)).pays, "its first token would be too late"
    assert estimate(at(1000, queued=1000, running=50), at(1000, queued=1100)).pays, "it would wait anyway"


def test_cached_tokens_cost_nothing() -> None:
    assert not estimate(at(10, running=8), at(1000)).pays, "the decode replica has nearly all of the prompt"
    assert estimate(at(1000, running=1), at(10)).pays, "the prefill replica has nearly all of the prompt"


def test_faster_prefill_replica_pays_without_any_other_sequence() -> None:
    assert estimate(at(1000), at(1000, rate=4000.0)).pays


def test_unknown_rates_are_taken_from_the_other_role() -> None:
    assert estimate_split(at(1000, running=8, rate=0.0), at(1000, rate=0.0), PullRate(FAST_NETWORK)) is None
    assert estimate_split(at(1000, running=8), at(1000), PullRate(0.0)) is None


def test_state_of_a_hybrid_model_costs_its_bytes() -> None:
    """A short prompt's state takes longer than its keys and values: computing it again is cheaper."""
    status = ReplicaStatus("d", "m", query_id=0, kv_pull_bytes_per_s=1e9, kv_token_bytes=2e4)
    hybrid = replace(status, kv_state_bytes=500_000_000)
    pulls = [PullRate.of(each) for each in (status, hybrid)]
    assert pulls[1].seconds(700) - pulls[0].seconds(700) == pytest.approx(0.5)
    decode, prefill = at(100, running=3), at(100)
    costs = [estimate_split(decode, prefill, pull) for pull in pulls]
    assert [each is not None and each.pays for each in costs] == [True, False]
    costs = [estimate_split(at(5000, running=3), at(5000), pull) for pull in pulls]
    assert [each is not None and each.pays for each in costs] == [True, True]
    assert PullRate.of(replace(status, kv_token_bytes=0.0)).seconds(1) == math.inf
    assert estimate(at(1000, running=8, rate=0.0), at(1000)) == estimate(
        at(1000, running=8), at(1000, rate=0.0)
    )


def test_patience_grows_with_the_expected_time() -> None:
    assert estimate(at(10), at(10)).patience_s < estimate(at(10), at(10, queued=10_000)).patience_s


class Pool:
    """A pool with a replica of each role."""

    def __init__(self, launcher: FakeLauncher) -> None:
        self._launcher = launcher
        self.pool = ReplicaPool("fake", 16)
        self.replicas: dict[str, FakeReplica] = {}

    async def add(self, role: str) -> None:
        deployment = Deployment.from_table({"model": "demo", "role": role})
        replica = self.replicas[role] = self._launcher.launch(deployment, role, lambda progress: None)
        replica.group.step_s = STEP_S
        client = self._launcher.connect(replica.record)
        client.start()
        self.pool.add(client)
        await self.until(lambda: self.pool.why_unavailable(role) == "")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_idle(self, role: str = "decode") -> None:
        """Wait until the pool knows that a replica runs nothing: its statuses are a second old."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.pool.clients[role].status(DEADLINE_S)).num_running:
                await asyncio.sleep(0.01)

    def status(self, role: str) -> ReplicaStatus:
        status = self.pool.clients[role].latest_status
        assert status is not None
        return status

    async def run(self, first: int, num_tokens: int = NUM_TOKENS, **settings: Any) -> list[Finish]:
        """Run a request with a prompt of its own; check its tokens."""
        prompt = [first, *range(2, 40)]
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, **{"temperature": 0.0, "seed": 1} | settings
        )
        running = self.pool.submit(Request(f"{first}", np.array(prompt, np.int32), params))
        tokens: list[list[int]] = [[] for _ in range(params.num_sequences)]
        ends = []
        async for index, update in running:
            tokens[index] += update.token_ids
            ends += [] if update.finish is None else [update.finish]
        assert tokens == [oracle(prompt, num_tokens, stops=())] * params.num_sequences
        return ends

    async def occupy(self) -> asyncio.Task[list[Finish]]:
        """Let the decode replica measure its rate, and run a sequence from then on."""
        await self.run(41, num_tokens=1)
        await self.until_idle()
        running = asyncio.ensure_future(self.run(42, num_tokens=400))
        await self.until(lambda: self.status("decode").num_running > 0)
        assert self.status("decode").prefill_tokens_per_s > 0
        await self.until_idle("prefill")  # not in its canary, which would be counted as delayed by a prompt
        return running

    async def finish(self, running: asyncio.Task[list[Finish]]) -> None:
        """Let the sequence of `occupy` end. It would take 24 s: longer than a busy machine holds a test up."""
        self.replicas["decode"].group.step_s = SlowWorkers.step_s
        await running


@pytest.fixture
@asynccontextmanager
async def pool(launcher: FakeLauncher) -> AsyncIterator[Pool]:
    pool = Pool(launcher)
    try:
        await pool.add("prefill")
        await pool.add("decode")
        yield pool
    finally:
        await pool.pool.close()


def num_pulls(pool: Pool) -> int:
    return pool.status("decode").num_kv_pulls


@pytest.mark.parametrize("num_outputs", [1, 3])
async def test_prompt_is_computed_apart_and_continued_from_its_blocks(pool: Pool, num_outputs: int) -> None:
    assert pool.status("prefill").role is ReplicaRole.PREFILL
    other = await pool.occupy()
    finished = pool.status("prefill").num_finished
    ends = await pool.run(43, n=num_outputs)
    await pool.until(lambda: num_pulls(pool) >= 1)
    assert all(end.timings.num_moves == 0 for end in ends), "it did not lose its replica"
    assert pool.status("prefill").num_finished == finished, "the prefill replica generated more than a token"
    assert pool.pool.collect_demand().num_prefill_tokens == 39
    await pool.finish(other)


async def test_full_queue_of_the_decode_replica_bounds_what_is_split(pool: Pool) -> None:
    other = await pool.occupy()
    pool.pool.max_waiting = 0
    await pool.run(43)
    assert pool.pool.collect_demand().num_prefill_tokens == 0
    await pool.finish(other)


async def test_short_output_and_idle_fleet_need_one_replica(pool: Pool) -> None:
    await pool.run(43)
    await pool.until_idle()
    await pool.run(44)
    await pool.until_idle()
    other = await pool.occupy()
    await pool.run(45, num_tokens=1)
    assert pool.pool.collect_demand().num_prefill_tokens == 0
    assert num_pulls(pool) == 0
    await pool.finish(other)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
async def test_prefill_replica_that_fails_costs_time_and_no_token(pool: Pool, delay_s: float) -> None:
    """The delays are those of its steps, more or less: the outcome is the same at whichever stage it fails."""
    other = await pool.occupy()
    split = asyncio.ensure_future(pool.run(43))
    await asyncio.sleep(delay_s)
    pool.replicas["prefill"].kill("killed")
    await split
    await pool.run(44)
    await pool.finish(other)


async def test_prefill_replica_runs_whole_requests_while_no_other_does(pool: Pool) -> None:
    pool.pool.remove("decode", "gone")
    await pool.run(43)
    await pool.add("decode")
    await pool.run(44)
