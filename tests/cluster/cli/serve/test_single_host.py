"""A server's only replica gets another scheduler when one ends, and is given up after bounded attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fake_fleet import FakeLauncher, FakeReplica
from fakes import oracle

from quire.cluster.cli.serve.single_host import keep_served
from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.replica.supervised_replica import MAX_REPLACEMENTS
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.gateway.routing.request_migration import MigratingRequest
from quire.cluster.text.requests.request import Request
from quire.proto.errors import QuireError, RankFailed, ReplicaUnavailable
from quire.proto.sampling import SamplingParams

DEADLINE_S = 60.0
PROMPT = list(range(2, 20))
# Of a replica that is to end while it runs a request of 100 tokens.
SLOW_STEP_S = 0.1
PARAMS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, seed=1)


class Server:
    """A pool with one replica.

    Attributes:
        replica: with the present scheduler.
        problem: raised by the next replacement.
    """

    def __init__(self, launcher: FakeLauncher) -> None:
        self._launcher = launcher
        self.problem: QuireError | None = None
        self.pool = ReplicaPool("fake", 16)
        self.replica = self._launch(1)
        client = launcher.connect(self.replica.record)
        client.start()
        self.pool.add(client)
        self.given_up = asyncio.create_task(
            keep_served(self.replica, self.pool, launcher.connect, self._replace)
        )

    def _launch(self, number: int) -> FakeReplica:
        deployment = Deployment.from_table({"model": "demo"})
        return self._launcher.launch(deployment, f"replica-{number}", lambda progress: None)

    def _replace(self, replica: FakeReplica, number: int) -> FakeReplica:
        if self.problem is not None:
            raise self.problem
        self.replica = self._launch(number)
        return self.replica

    def submit(self) -> MigratingRequest:
        return self.pool.submit(Request("mine", np.array(PROMPT, np.int32), PARAMS))


@pytest.fixture
@asynccontextmanager
async def server(launcher: FakeLauncher) -> AsyncIterator[Server]:
    server = Server(launcher)
    try:
        yield server
    finally:
        server.given_up.cancel()
        await server.pool.close()


async def follow(running: MigratingRequest, on_tokens: Callable[[int], None]) -> list[int]:
    tokens: list[int] = []
    async for _, update in running:
        tokens += update.token_ids
        on_tokens(len(tokens))
        if update.finish is not None and update.finish.grpc_status:
            raise update.finish.to_error()
    return tokens


async def test_request_continues_after_its_scheduler_was_replaced(server: Server) -> None:
    first = server.replica
    first.group.step_s = SLOW_STEP_S

    def kill(num_tokens: int) -> None:
        if num_tokens >= 3:
            first.kill("the scheduler's process died")

    assert await follow(server.submit(), kill) == oracle(PROMPT, 100, stops=())
    assert server.replica.replica_id == "replica-2"
    assert not server.given_up.done()


async def test_replica_that_gave_up_on_a_rank_is_not_replaced(server: Server) -> None:
    server.replica.group.step_s = SLOW_STEP_S
    running = server.submit()
    server.replica.failure.set_result(RankFailed(1, "killed; given up"))
    error = await server.given_up
    assert isinstance(error, RankFailed)
    with pytest.raises(ReplicaUnavailable, match="given up"):
        await follow(running, lambda _: None)


async def test_replica_is_given_up_if_it_cannot_be_replaced(server: Server) -> None:
    server.problem = ReplicaUnavailable("no memory")
    server.replica.failure.set_result(ReplicaUnavailable("its process died"))
    assert str(await server.given_up) == "its process died; it could not be replaced: no memory"


async def test_replacements_are_bounded(server: Server) -> None:
    for number in range(1, MAX_REPLACEMENTS + 2):
        while server.replica.replica_id != f"replica-{number}":
            await asyncio.sleep(0.001)
        server.replica.failure.set_result(ReplicaUnavailable("its process died"))
    assert f"given up: its scheduler failed {MAX_REPLACEMENTS + 1} times" in str(await server.given_up)
