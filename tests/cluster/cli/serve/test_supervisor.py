"""The supervisor of a server's replica replaces its scheduler, and gives the replica up after bounded attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fake_fleet import FakeLauncher, FakeReplica
from fakes import oracle

from quire.cluster.cli.serve.supervisor import ReplicaSupervisor
from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.replacement_limit import MAX_REPLACEMENTS
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
    """A supervised replica.

    Attributes:
        problem: raised by the next replacement.
    """

    def __init__(self, launcher: FakeLauncher) -> None:
        self._launcher = launcher
        self.problem: QuireError | None = None
        self.pool = ReplicaPool("fake", 16, is_fixed=False, is_own=True)
        replica = self._launch(1)
        client = self._connect(replica)
        self.pool.add(client)
        self.supervisor = ReplicaSupervisor(replica, client, self.pool, self._connect, self._replace)
        self.given_up = asyncio.create_task(self.supervisor.run())

    def _launch(self, number: int) -> FakeReplica:
        deployment = Deployment.from_table({"model": "demo"})
        return self._launcher.launch(deployment, f"replica-{number}", lambda progress: None)

    def _connect(self, replica: FakeReplica) -> ReplicaClient:
        client = self._launcher.connect(replica.record)
        client.start()
        return client

    def _replace(self, replica: FakeReplica, number: int) -> FakeReplica:
        if self.problem is not None:
            raise self.problem
        return self._launch(number)

    def submit(self) -> MigratingRequest:
        return self.pool.submit(Request("mine", np.array(PROMPT, np.int32), PARAMS))


def run(scenario: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        launcher = FakeLauncher()
        server = Server(launcher)
        try:
            async with asyncio.timeout(2 * DEADLINE_S):
                await scenario(server)
        finally:
            server.given_up.cancel()
            await server.pool.close()
            launcher.close()

    asyncio.run(main())


async def follow(running: MigratingRequest, on_tokens: Callable[[int], None]) -> list[int]:
    tokens: list[int] = []
    async for _, update in running:
        tokens += update.token_ids
        on_tokens(len(tokens))
        if update.finish is not None and update.finish.grpc_status:
            raise update.finish.to_error()
    return tokens


def test_request_continues_after_its_scheduler_was_replaced() -> None:
    async def scenario(server: Server) -> None:
        first = server.supervisor.replica
        first.group.step_s = SLOW_STEP_S

        def kill(num_tokens: int) -> None:
            if num_tokens >= 3:
                first.kill("the scheduler's process died")

        assert await follow(server.submit(), kill) == oracle(PROMPT, 100, stops=())
        assert server.supervisor.replica.replica_id == "replica-2"
        assert not server.given_up.done()

    run(scenario)


def test_replica_that_gave_up_on_a_rank_is_not_replaced() -> None:
    async def scenario(server: Server) -> None:
        server.supervisor.replica.group.step_s = SLOW_STEP_S
        running = server.submit()
        server.supervisor.replica.failure.set_result(RankFailed(1, "killed; given up"))
        error = await server.given_up
        assert isinstance(error, RankFailed)
        with pytest.raises(ReplicaUnavailable, match="given up"):
            await follow(running, lambda _: None)

    run(scenario)


def test_replica_is_given_up_if_it_cannot_be_replaced() -> None:
    async def scenario(server: Server) -> None:
        server.problem = ReplicaUnavailable("no memory")
        server.supervisor.replica.failure.set_result(ReplicaUnavailable("its process died"))
        assert str(await server.given_up) == "its process died; it could not be replaced: no memory"

    run(scenario)


def test_replacements_are_bounded() -> None:
    async def scenario(server: Server) -> None:
        for number in range(1, MAX_REPLACEMENTS + 2):
            while server.supervisor.replica.replica_id != f"replica-{number}":
                await asyncio.sleep(0.001)
            server.supervisor.replica.failure.set_result(ReplicaUnavailable("its process died"))
        assert f"given up: its scheduler failed {MAX_REPLACEMENTS + 1} times" in str(await server.given_up)

    run(scenario)
