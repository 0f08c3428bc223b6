"""Ended streams, aborts, failed replicas and full queues, over loopback gRPC with the real scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from narrowing import not_none
from serving import (
    DEADLINE_S,
    ENDLESS,
    NUM_ENDLESS_TOKENS,
    PROMPT,
    ServerFactory,
    drain,
    eventually,
    first_delta,
    until_free,
)

from quire.cluster.client.client import AsyncClient
from quire.cluster.gateway.generation.retention import RetentionLimits
from quire.proto.errors import (
    DeadlineExpired,
    DuplicateRequest,
    Overloaded,
    ReplicaUnavailable,
    RequestAborted,
)
from quire.proto.replica_status import ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import CacheReport

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.mark.parametrize("how", ["close", "disconnect", "deadline"])
async def test_broken_stream_frees_its_blocks(serve: ServerFactory, how: str) -> None:
    limits = RetentionLimits(resume_window_s=0.3)
    async with serve(retention=limits) as server, AsyncClient(server.target) as observer:
        before = (await observer.status())[0].kv.num_used_blocks
        client = AsyncClient(server.target)
        server.brake.slow_down()
        if how == "deadline":
            server.brake.hold()  # so that no token comes before the deadline
            with pytest.raises(DeadlineExpired):
                await drain(client.generate_stream(PROMPT, ENDLESS, timeout_s=0.5))
        else:
            events = client.generate_stream(PROMPT, ENDLESS)
            await first_delta(events)
            server.brake.hold()
            assert server.replica.num_running == 1
            await (events.aclose() if how == "close" else client.close())

        async def is_forgotten() -> bool:
            return server.replica.num_running == 0

        await eventually(is_forgotten)
        server.brake.release()

        async def is_free() -> bool:
            return (await observer.status())[0].kv.num_used_blocks == before

        await eventually(is_free)
        assert len(server.brake.steps) < NUM_ENDLESS_TOKENS, "the request ran to its end"
        await client.close()


async def test_abort_ends_the_stream_and_frees_its_blocks(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        events = client.generate_stream(PROMPT, ENDLESS, request_id="long")
        await first_delta(events)
        with pytest.raises(DuplicateRequest, match=r"'long' belongs to .* other content"):
            await client.generate(PROMPT, GREEDY, request_id="long")
        assert await client.abort("long")
        with pytest.raises(RequestAborted, match="'long' was aborted"):
            await drain(events)
        assert not await client.abort("long")

        await until_free(client)
        assert (await client.generate(PROMPT, GREEDY, request_id="long")).request_id == "long"


async def test_health_follows_the_replica(serve: ServerFactory) -> None:
    async with (
        serve(ready=False) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "quire.v1.Inference"):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
            statuses = [(await watch.read()).status]
            if statuses[0] == health_pb2.HealthCheckResponse.NOT_SERVING:
                statuses.append((await watch.read()).status)
            assert statuses[-1] == health_pb2.HealthCheckResponse.SERVING
        client = AsyncClient(server.target)
        server.brake.slow_down()
        running = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(running)
        server.be_silent()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(ReplicaUnavailable, match="replica-0 failed: it has been silent for"):
            await drain(running)
        server.speak_again()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await client.is_ready()
        await client.close()


async def test_failed_replica_stays_failed_despite_later_statuses(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        running = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(running)
        # The replica still runs, so its statuses keep coming, like those sent just before a failure.
        server.replica.fail("rank 1 failed at step 7: killed")
        messages: asyncio.Queue[ReplicaStatus | CacheReport] = asyncio.Queue()
        server.replica.add_listener(messages.put_nowait)
        with pytest.raises(ReplicaUnavailable, match="replica-0 failed: rank 1 failed at step 7: killed"):
            await drain(running)
        while not isinstance(await asyncio.wait_for(messages.get(), DEADLINE_S), ReplicaStatus):
            pass
        assert server.replica.has_failed
        assert "rank 1 failed" in server.replica.problem
        assert "rank 1 failed" in await server.replica.wait_until_failed()
        with pytest.raises(ReplicaUnavailable, match="rank 1 failed"):
            await client.generate(PROMPT, GREEDY)
        assert not await client.is_ready()


async def test_ended_replica_fails_its_requests_and_rejects_new_ones(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        events = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(events)
        await asyncio.to_thread(server.stop_replica)
        with pytest.raises(ReplicaUnavailable, match="replica-0 is shutting down"):
            await drain(events)
        with pytest.raises(ReplicaUnavailable, match="replica-0"):
            await client.generate(PROMPT, GREEDY)
        assert not await client.is_ready()


async def test_silent_replica_fails_its_requests(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        server.be_silent()
        with pytest.raises(ReplicaUnavailable, match="replica-0 failed: it has been silent for"):
            await client.generate(PROMPT, GREEDY)


async def test_full_queue_rejects_requests(serve: ServerFactory) -> None:
    async with serve(max_num_seqs=1, max_queue_len=2) as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        first = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(first)
        server.brake.catch()
        calls = [asyncio.ensure_future(client.generate(PROMPT, GREEDY)) for _ in range(8)]

        async def have_all_come() -> bool:
            return server.replica.num_running == 1 + len(calls)

        async def are_all_but_two_done() -> bool:
            return sum(call.done() for call in calls) == 6

        await eventually(have_all_come)
        server.brake.release()
        await eventually(are_all_but_two_done)
        await first.aclose()
        server.brake.speed_up()
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, Overloaded)]
        assert len(refused) == 6
        assert all(error.retry_after_s is not None for error in refused)
        assert sum(not isinstance(result, Exception) for result in results) == 2


async def test_queue_delay_is_that_of_the_queued_tokens_at_the_present_speed(serve: ServerFactory) -> None:
    async with serve() as server:
        pool, status = server.models.find("tiny").pool, not_none(server.replica.latest_status)
        server.replica.latest_status = replace(status, queued_tokens=300, tokens_per_s=100.0)
        assert pool.queue_delay_s == 3.0
        server.replica.latest_status = replace(status, queued_tokens=300, tokens_per_s=0.0)
        assert pool.queue_delay_s is None
