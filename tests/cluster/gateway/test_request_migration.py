"""A request's account over several replicas, with replicas that say what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from quire.cluster.gateway.request_migration import MAX_FAILED_REPLICAS, MigratingRequest
from quire.cluster.requests.request import Request
from quire.cluster.requests.sequence_update import SequenceUpdate
from quire.proto.errors import DeadlineExpired, ProtocolError, ReplicaUnavailable
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Finish, FinishReason, Timings

SECONDS_A_STEP = 1.0


class FakeClient:
    """A replica's client; `placed` is what it was handed, with who is told."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.placed: list[tuple[Request, Any]] = []
        self.stopped: list[int] = []
        self.forgotten: list[int] = []
        self.problem = ""

    def place(self, request: Request, make_receiver: Callable[[range], Any]) -> Any:
        if self.problem:
            raise ReplicaUnavailable(self.problem)
        start = 100 * (1 + len(self.placed))
        receiver = make_receiver(range(start, start + request.sampling.num_sequences))
        self.placed.append((request, receiver))
        return receiver

    def say(self, number: int, index: int, *tokens: int, **finish: Any) -> None:
        """Updates of an answer of the n-th request that was placed here."""
        receiver = self.placed[number][1]
        handle = receiver.handles[index]
        end = Finish(handle, **finish) if finish else None
        receiver.put(handle, SequenceUpdate(list(tokens), finish=end))

    def stop(self, handle: int) -> None:
        self.stopped.append(handle)

    def forget(self, handles: range) -> None:
        self.forgotten += handles


class FakeReplicaPicker:
    """Two replicas, `a` while it does not drain."""

    is_fixed = False

    def __init__(self) -> None:
        self.a, self.b = FakeClient("a"), FakeClient("b")
        self.drained: list[str] = []

    def drain(self, replica_id: str) -> None:
        self.drained.append(replica_id)

    def choose(self, request: Request) -> Any:
        return self.b if self.drained else self.a

    async def wait_for_replica(self, request: Request, timeout_s: float | None) -> Any:
        return self.choose(request)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(scenario: Callable[[FakeReplicaPicker, Clock], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(FakeReplicaPicker(), Clock()), 60))


def request(**params: Any) -> Request:
    sampling = SamplingParams(**({"max_tokens": 9, "seed": 7, "temperature": 0.5} | params))
    return Request("mine", np.array([1, 2, 3], np.int32), sampling, tenant="gold", salt=b"s", timeout_s=60.0)


async def settle() -> None:
    """Everything goes on until it waits: nothing here takes time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def take(moving: MigratingRequest, count: int) -> list[tuple[int, SequenceUpdate]]:
    return [await anext(moving) for _ in range(count)]


def test_usage_and_times_are_those_of_the_whole_request() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(logprobs=2), places, clock)
        moving.start()
        places.a.say(0, 0, 10, 11)
        places.a.say(
            0, 0, 12, reason=FinishReason.MOVED, num_cached_tokens=2, timings=Timings(1.0, 2.0, 3.0, 0.0, 0)
        )
        clock.now = 5.0
        await settle()
        ((rest, _),) = places.b.placed
        assert rest.generated_token_ids.tolist() == [10, 11, 12]
        assert (rest.sampling.seed, rest.sampling.max_tokens, rest.sampling.logprobs) == (7, 9, 2)
        assert (rest.tenant, rest.salt, rest.timeout_s) == ("gold", b"s", 55.0)
        places.b.say(
            0, 0, 13, reason=FinishReason.LENGTH, num_completion_tokens=4, num_cached_tokens=6,
            timings=Timings(0.5, 0.5, 1.0, 0.0, 6),
        )  # fmt: skip
        ((index, news),) = [item async for item in moving]
        assert (index, news.token_ids) == (0, [10, 11, 12, 13])
        assert news.finish is not None
        assert news.finish.num_cached_tokens == 2
        # Between the replicas it had been preempted, for five seconds.
        assert news.finish.timings == Timings(1.5, 2.5, 4.0, 5.0, 6, num_moves=1)

    run(scenario)


def test_tokens_that_came_with_the_failure_are_told() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(), places, clock)
        moving.start()
        clock.now = 2.0
        places.drained.append("a")
        places.a.say(0, 0, 10, reason=FinishReason.ERROR, grpc_status="UNAVAILABLE", error="rank 0 failed")
        assert await take(moving, 1) == [(0, SequenceUpdate([10]))]
        await settle()
        assert places.b.placed[0][0].generated_token_ids.tolist() == [10]
        places.b.say(0, 0, 11, reason=FinishReason.STOP)
        ((_, news),) = await take(moving, 1)
        assert news.token_ids == [11]
        assert news.finish is not None
        assert news.finish.timings == Timings(decode_s=2.0, num_moves=1)

    run(scenario)


def test_answers_go_on_with_their_own_seeds() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(n=3), places, clock)
        moving.start()
        places.a.say(0, 1, 10, reason=FinishReason.STOP)
        for index in (0, 2):
            places.a.say(0, index, 20 + index, reason=FinishReason.MOVED)
        await settle()
        rests = [(each.sampling, each.generated_token_ids.tolist()) for each, _ in places.b.placed]
        assert [(sampling.seed, sampling.n, tokens) for sampling, tokens in rests] == [
            (7, 1, [20]),
            (9, 1, [22]),
        ]
        moving.stop(2)
        assert places.b.stopped == [200]

    run(scenario)


def test_a_request_of_which_nothing_came_moves_whole() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(n=3), places, clock)
        moving.start()
        for index in range(3):
            places.a.say(0, index, reason=FinishReason.MOVED)
        await settle()
        ((again, _),) = places.b.placed
        assert (again.sampling.n, again.sampling.seed, len(again.generated_token_ids)) == (3, 7, 0)
        moving.abort()
        assert places.b.forgotten == [100, 101, 102]

    run(scenario)


def test_errors_of_the_request_itself_end_it() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(), places, clock)
        moving.start()
        places.a.say(0, 0, reason=FinishReason.ERROR, grpc_status="DEADLINE_EXCEEDED", error="too late")
        ((_, news),) = await take(moving, 1)
        assert news.finish is not None
        assert news.finish.grpc_status == "DEADLINE_EXCEEDED"
        assert places.b.placed == []

    run(scenario)


def test_the_deadline_counts_from_the_beginning() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(), places, clock)
        moving.start()
        clock.now = 60.0
        places.a.say(0, 0, 10, reason=FinishReason.MOVED)
        await settle()
        with pytest.raises(DeadlineExpired):
            await take(moving, 2)

    run(scenario)


def test_a_replica_that_fails_under_several_answers_fails_once() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(n=3), places, clock)
        moving.start()
        for index in range(3):
            places.a.say(0, index, 10 + index, reason=FinishReason.MOVED)
        await settle()
        parts = [receiver for _, receiver in places.b.placed]
        assert len(parts) == MAX_FAILED_REPLICAS
        places.drained.clear()  # the first one takes requests again
        for part in parts:
            part.fail(ReplicaUnavailable("rank 0 was killed"))
        await settle()
        assert [each.generated_token_ids.tolist() for each, _ in places.a.placed[1:]] == [[10], [11], [12]]

    run(scenario)


def test_a_replica_that_fails_again_and_again_is_given_up() -> None:
    """It may have come back meanwhile, under the same name."""

    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        moving = MigratingRequest(request(), places, clock)
        moving.start()
        for number in range(MAX_FAILED_REPLICAS):
            await settle()
            places.a.placed[number][1].fail(ReplicaUnavailable("it was silent"))
        with pytest.raises(
            ReplicaUnavailable, match="3 replicas failed while running this request; the last: it was silent"
        ):
            await take(moving, 1)

    run(scenario)


def test_a_fault_of_ours_in_placing_a_request_ends_it() -> None:
    async def scenario(places: FakeReplicaPicker, clock: Clock) -> None:
        async def stumble(request: Request, timeout_s: float | None) -> None:
            raise KeyError("a fault")

        places.wait_for_replica = stumble  # type: ignore[method-assign]
        moving = MigratingRequest(request(), places, clock)
        moving.start()
        places.a.say(0, 0, 10, reason=FinishReason.MOVED)
        with pytest.raises(ProtocolError, match="its log has the traceback"):
            await take(moving, 2)

    run(scenario)
