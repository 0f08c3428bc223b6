"""Weights of a model's replicas: one that starts later, or that another gateway has changed, gets the latest ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from local_replica import DEADLINE_S, LocalReplica, local_replica
from local_server import local_config
from reference import Reference

from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.admin.engine_control import control_replicas
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.text.requests.engine_commands import update_command
from quire.cluster.text.requests.request import Request
from quire.proto.engine_command import PauseMode
from quire.proto.errors import InvalidRequest, ReplicaUnavailable
from quire.proto.sampling import SamplingParams

PROMPT = [5, 9, 11, 40, 7, 3, 2, 8]
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    return make_model("llama", seed=21), make_model("llama", seed=22)


@pytest.fixture
def replicas(folders: tuple[Path, Path]) -> Iterator[list[LocalReplica]]:
    config = local_config(folders[0])
    with ExitStack() as opened:
        yield [opened.enter_context(local_replica(config, f"replica-{index}")) for index in range(2)]


def connect(pool: ReplicaPool, replica: LocalReplica, replica_id: str) -> None:
    client = ReplicaClient(replica.address, replica_id, heartbeat_s=0.1)
    client.start()
    pool.add(client)


async def until_ready(pool: ReplicaPool, *replica_ids: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while any(pool.why_unavailable(each) for each in replica_ids):
            await asyncio.sleep(0.01)


async def generate(pool: ReplicaPool) -> tuple[list[int], str]:
    """Return the tokens of a request, and the version of their weights."""
    tokens: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        async for _, update in pool.submit(Request("r", np.array(PROMPT, np.int32), GREEDY)):
            tokens += update.token_ids
            if update.finish is not None:
                return tokens, update.finish.weights_version
    raise AssertionError("the request has no end")


async def test_replica_that_starts_later_loads_the_latest_weights_first(
    folders: tuple[Path, Path], replicas: list[LocalReplica]
) -> None:
    expected = Reference(folders[1]).generate(PROMPT, NUM_TOKENS)
    pool = ReplicaPool("tiny", 16)
    connect(pool, replicas[0], "replica-0")
    await until_ready(pool, "replica-0")
    await control_replicas(pool, update_command(str(folders[1]), "step-1", PauseMode.KEEP))
    assert await generate(pool) == (expected, "step-1")
    connect(pool, replicas[1], "replica-1")
    await until_ready(pool, "replica-1")
    pool.remove("replica-0", "the test removes it")
    assert await generate(pool) == (expected, "step-1")
    await pool.close()


async def test_gateway_learns_of_an_update_by_another_one(
    folders: tuple[Path, Path], replicas: list[LocalReplica]
) -> None:
    pools = [ReplicaPool("tiny", 16) for _ in range(2)]
    for pool in pools:
        connect(pool, replicas[0], "replica-0")
        await until_ready(pool, "replica-0")
    connect(pools[1], replicas[1], "replica-1")
    await control_replicas(pools[0], update_command(str(folders[1]), "step-1", PauseMode.KEEP))
    async with asyncio.timeout(DEADLINE_S):
        while [status.weights_version for status in pools[1].statuses] != ["step-1"] * 2:
            await asyncio.sleep(0.01)
    for pool in pools:
        await pool.close()


async def test_update_after_the_clock_went_back_is_the_latest(
    folders: tuple[Path, Path], replicas: list[LocalReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ReplicaPool("tiny", 16)
    connect(pool, replicas[0], "replica-0")
    await until_ready(pool, "replica-0")
    for seconds, version in ((2_000, "step-1"), (1_000, "step-2")):
        monkeypatch.setattr("time.time_ns", lambda now=seconds: now * 10**9)
        await control_replicas(pool, update_command(str(folders[1]), version, PauseMode.KEEP))
        async with asyncio.timeout(DEADLINE_S):
            while [status.weights_version for status in pool.statuses] != [version]:
                await asyncio.sleep(0.01)
    await pool.close()


async def test_refused_update_leaves_the_weights_of_all_replicas(
    folders: tuple[Path, Path], replicas: list[LocalReplica]
) -> None:
    pool = ReplicaPool("tiny", 16)
    for index, replica in enumerate(replicas):
        connect(pool, replica, f"replica-{index}")
    await until_ready(pool, "replica-0", "replica-1")
    with pytest.raises(InvalidRequest, match="missing"):
        await control_replicas(pool, update_command("/missing", "step-1", PauseMode.KEEP))
    assert pool.weights.timestamp == ""
    assert await generate(pool) == (Reference(folders[0]).generate(PROMPT, NUM_TOKENS), "")
    await pool.close()
    with pytest.raises(ReplicaUnavailable, match="no replica of tiny runs"):
        await control_replicas(pool, update_command("/missing", "step-1", PauseMode.KEEP))
