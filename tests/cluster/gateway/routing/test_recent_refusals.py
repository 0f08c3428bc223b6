"""Requests that the gateway refuses because the scheduler has just refused another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest

from quire.cluster.fleet.controller.demand import Demand
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.routing.recent_refusals import MAX_TENANTS, Moment, RecentRefusals
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.text.requests.request import Request
from quire.proto.errors import Overloaded
from quire.proto.refusal import MAX_HOLD_S, RefusalScope
from quire.proto.replica_status import ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Abort, Finish, FinishReason, ReplicaMessage, StatusQuery, Submit, TokenBatch
from quire.proto.stream_codec import decode, encode
from quire.scheduler.core.state.outbox import error_finish

DEADLINE_S = 60.0
FULL = RefusalScope(0.1)
LATE = RefusalScope(0.05, max_timeout_s=3.0)


def request(tenant: str = "", priority: int = 0, timeout_s: float | None = None) -> Request:
    prompt = np.arange(1, 6, dtype=np.int32)
    params = SamplingParams(max_tokens=20, seed=1)
    return Request("mine", prompt, params, tenant, priority, timeout_s)


def refused(scope: RefusalScope | None, retry_after_s: float | None = 1.5) -> Finish:
    error = Overloaded("16 requests are waiting already", retry_after_s=retry_after_s, scope=scope)
    return error_finish(7, error)


@pytest.mark.parametrize(
    ("scope", "timeout_s", "is_refused"),
    [(FULL, None, True), (FULL, 9.0, True), (LATE, 3.0, True), (LATE, 3.1, False), (LATE, None, False)],
)
def test_scope_has_deadlines_up_to_the_longest(
    scope: RefusalScope, timeout_s: float | None, is_refused: bool
) -> None:
    refusals = RecentRefusals()
    refusals.add(request(), refused(scope), Moment(10.0, 4))
    assert (refusals.find("", 0, timeout_s, Moment(10.04, 4)) is not None) is is_refused


@pytest.mark.parametrize(
    ("time_s", "num_ended", "is_refused"), [(10.09, 4, True), (10.11, 4, False), (10.01, 5, False)]
)
def test_refusal_holds_for_its_time_or_until_a_sequence_ends(
    time_s: float, num_ended: int, is_refused: bool
) -> None:
    refusals = RecentRefusals()
    refusals.add(request(), refused(FULL), Moment(10.0, 4))
    assert (refusals.find("", 0, None, Moment(time_s, num_ended)) is not None) is is_refused


def test_refusal_is_of_one_tenant_and_of_no_higher_priority() -> None:
    refusals, now = RecentRefusals(), Moment(10.0, 4)
    refusals.add(request("heavy", priority=1), refused(FULL), now)
    assert refusals.find("light", 0, None, now) is None
    assert refusals.find("heavy", 2, None, now) is None
    assert refusals.find("heavy", 1, None, now) is not None
    assert refusals.find("heavy", 0, None, now) is not None


def test_refusal_without_a_scope_is_not_kept() -> None:
    refusals, now = RecentRefusals(), Moment(10.0, 4)
    refusals.add(request(), refused(None), now)
    assert refusals.find("", 0, None, now) is None


def test_refusals_of_many_tenants_are_bounded() -> None:
    refusals, now = RecentRefusals(), Moment(10.0, 4)
    for number in range(2 * MAX_TENANTS):
        refusals.add(request(f"tenant-{number}"), refused(FULL), now)
    assert len(refusals._by_tenant) <= MAX_TENANTS
    assert refusals.find(f"tenant-{2 * MAX_TENANTS - 1}", 0, None, now) is not None


@pytest.mark.parametrize(("first", "later"), [(1.5, 1.45), (MAX_HOLD_S, MAX_HOLD_S), (None, None)])
def test_repeated_refusal_names_the_rest_of_the_delay(first: float | None, later: float | None) -> None:
    refusals = RecentRefusals()
    refusals.add(request(), refused(FULL, first), Moment(10.0, 4))
    found = refusals.find("", 0, None, Moment(10.05, 4))
    assert found is not None
    error = found.repeat("replica-1", 10.05)
    assert error.retry_after_s == (None if later is None else pytest.approx(later))
    assert "refused by the gateway, as replica replica-1 refused" in str(error)
    assert "50 ms ago: 16 requests are waiting already" in str(error)


class Replica:
    """The connection of a replica that refuses every request but canaries, which have one token.

    Attributes:
        submits: the requests that came.
        scope: of the refusals.
        takes: requests are taken, and never end by themselves.
    """

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.submits: list[Submit] = []
        self.scope: RefusalScope | None = RefusalScope(3600.0)
        self.takes = False
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    def open(self) -> None: ...

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, StatusQuery):
            self.answer(self._status(message.query_id))
        elif isinstance(message, Submit) and message.sampling.max_tokens == 1:
            token = np.array([message.handle], np.int32), np.array([3], np.int32)
            self.answer(
                TokenBatch(1, *token, finished=(Finish(message.handle, FinishReason.LENGTH, None, 1, 1),))
            )
        elif isinstance(message, Submit):
            self.submits.append(message)
            if not self.takes:
                end = replace(refused(self.scope), handle=message.handle)
                self.answer(TokenBatch(0, finished=(end,)))
        else:
            assert isinstance(message, Abort)

    def answer(self, message: ReplicaMessage) -> None:
        self._frames.put_nowait(encode(message))

    def end_first(self) -> None:
        """End the first request that was taken."""
        self.answer(TokenBatch(2, finished=(Finish(self.submits[0].handle, FinishReason.LENGTH),)))

    async def receive(self) -> bytes:
        return await self._frames.get()

    def receive_arrived(self) -> bytes | None:
        return None

    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self, linger_ms: int) -> None: ...

    def _status(self, query_id: int) -> ReplicaStatus:
        values: dict[str, Any] = {each.name: 0 for each in fields(ReplicaStatus) if each.default is MISSING}
        texts = {
            "replica_id": self.replica_id,
            "model": "fake",
            "problem": "",
            "ranks": (),
            "draining": False,
        }
        return ReplicaStatus(**{**values, **texts, "query_id": query_id})


def run(
    scenario: Callable[[ReplicaPool, list[Replica]], Coroutine[Any, Any, None]], num_replicas: int = 1
) -> None:
    async def main() -> None:
        pool = ReplicaPool("fake", 16, is_fixed=True)
        replicas = [Replica(f"replica-{index}") for index in range(num_replicas)]
        for replica in replicas:
            client = ReplicaClient("", replica.replica_id, connection=replica, heartbeat_s=3600.0)
            client.start()
            pool.add(client)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while any(pool.why_unavailable(replica.replica_id) for replica in replicas):
                    await asyncio.sleep(0)
                await scenario(pool, replicas)
        finally:
            await pool.close()

    asyncio.run(main())


async def end(pool: ReplicaPool, wanted: Request) -> Finish | None:
    """Run a request; return its end."""
    async for _, update in pool.submit(wanted):
        if update.finish is not None:
            return update.finish
    return None


def test_pool_refuses_what_its_replica_has_just_refused() -> None:
    async def scenario(pool: ReplicaPool, replicas: list[Replica]) -> None:
        pool.check_room("heavy", 0, None)
        await end(pool, request("heavy"))
        with pytest.raises(Overloaded, match="refused by the gateway"):
            pool.check_room("heavy", 0, None)
        pool.check_room("light", 0, None)
        assert len(replicas[0].submits) == 1

    run(scenario)


def test_refused_requests_count_as_demand() -> None:
    async def scenario(pool: ReplicaPool, replicas: list[Replica]) -> None:
        await end(pool, request())
        for _ in range(3):
            with pytest.raises(Overloaded):
                pool.check_room("", 0, None)
        assert pool.collect_demand() == Demand(4, 20)

    run(scenario)


@pytest.mark.parametrize("how", ["end", "abort", "refusal without a scope"])
def test_pool_asks_again_once_a_sequence_has_ended(how: str) -> None:
    async def scenario(pool: ReplicaPool, replicas: list[Replica]) -> None:
        (replica,) = replicas
        replica.takes = True
        running = pool.submit(request())
        replica.takes = False
        await end(pool, request())
        with pytest.raises(Overloaded):
            pool.check_room("", 0, None)
        if how == "end":
            replica.end_first()
            assert [update.finish is not None async for _, update in running] == [True]
        elif how == "abort":
            running.abort()
        else:
            replica.scope = None  # this request was refused for its own sake
            await end(pool, request())
        pool.check_room("", 0, None)

    run(scenario)


def test_pool_refuses_only_what_each_replica_would_refuse() -> None:
    async def scenario(pool: ReplicaPool, replicas: list[Replica]) -> None:
        while min(len(replica.submits) for replica in replicas) == 0:
            pool.check_room("", 0, None)
            await end(pool, request())
        with pytest.raises(Overloaded):
            pool.check_room("", 0, None)
        pool.drain("replica-0")
        with pytest.raises(Overloaded, match="replica-1"):
            pool.check_room("", 0, None)
        pool.drain("replica-1")
        pool.check_room("", 0, None)  # whether there is a replica is checked later

    run(scenario, num_replicas=2)
