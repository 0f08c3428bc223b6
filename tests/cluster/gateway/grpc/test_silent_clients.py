"""Clients with an HTTP/2 window of zero: they hold up nobody else, and the server ends their calls."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from serving import DEADLINE_S, ENDLESS, PROMPT, ServerFactory, drain, eventually, until_free
from silent_client import SilentClient

from quire import AsyncClient
from quire.cluster.gateway.grpc import health, responses
from quire.cluster.gateway.grpc.server import Gateway
from quire.proto import admin_pb2, inference_pb2
from quire.proto.errors import ReplicaUnavailable

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
HEALTH = health_pb2.HealthCheckRequest()
GENERATION = inference_pb2.GenerateRequest(
    text=PROMPT, sampling=inference_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
)
WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/quire.v1.Inference/GenerateStream"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STREAMS: list[tuple[str, Message]] = [
    (WATCH, HEALTH),
    (GENERATE, GENERATION),
    ("/quire.v1.Admin/WatchEvents", admin_pb2.WatchEventsRequest()),
    (REFLECT, reflection_pb2.ServerReflectionRequest(list_services="")),
]


async def test_health_turns_for_others_while_a_watcher_does_not_read(serve: ServerFactory) -> None:
    async with (
        serve() as server,
        AsyncClient(server.target) as client,
        SilentClient(server.target) as silent,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        silent.call(WATCH, HEALTH)
        watch = stub.Watch(HEALTH)
        assert (await watch.read()).status == SERVING
        server.brake.slow_down()
        running = asyncio.create_task(drain(client.generate_stream(PROMPT, ENDLESS)))
        server.be_silent()
        with pytest.raises(ReplicaUnavailable, match="it has been silent for"):
            await running
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(HEALTH)).status == NOT_SERVING
        server.speak_again()
        assert (await watch.read()).status == SERVING


@pytest.mark.parametrize("answers_pings", [False, True])
async def test_stop_ends_calls_whose_clients_do_not_read(serve: ServerFactory, answers_pings: bool) -> None:
    async with serve() as server:
        gateway = Gateway(server.services)
        target = await gateway.start()
        async with SilentClient(target, answers_pings=answers_pings) as silent:
            for method, message in STREAMS:
                silent.call(method, message, ends=method != REFLECT)

            async def is_running() -> bool:
                return bool(server.replica.num_running)

            await eventually(is_running)
            await asyncio.wait_for(gateway.stop(0.1), DEADLINE_S)
            assert server.replica.num_running == 0


async def test_calls_of_clients_that_do_not_read_are_ended(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They get the status if they read again."""
    monkeypatch.setattr(responses, "WRITE_TIMEOUT_S", 0.1)
    async with serve() as server, SilentClient(server.target) as silent:

        async def is_ended_unread(method: str, message: Message) -> bool:
            """Without a deadline, the call would go on once its client reads."""
            stream = silent.call(method, message, ends=method != REFLECT)
            await asyncio.sleep(0.5)
            silent.read(stream)
            await asyncio.sleep(0.1)
            return stream in silent.ended

        server.brake.slow_down()
        for method, message in STREAMS:
            await eventually(partial(is_ended_unread, method, message))
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


async def test_request_ends_when_its_client_does_not_read(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "WRITE_TIMEOUT_S", 1.0)
    async with (
        serve() as server,
        AsyncClient(server.target) as client,
        SilentClient(server.target) as silent,
    ):
        held = asyncio.create_task(asyncio.to_thread(server.brake.catch))
        silent.call(GENERATE, GENERATION)
        await held

        async def is_ended() -> bool:
            return not server.replica.num_running

        await eventually(is_ended)
        server.brake.release()
        await until_free(client)


async def test_streams_of_reflection_that_stay_open_hold_up_nobody(serve: ServerFactory) -> None:
    """With a thread for each of them, no thread was left for other calls."""
    async with (
        serve() as server,
        AsyncClient(server.target) as client,
        SilentClient(server.target) as silent,
    ):
        for _ in range(100):
            silent.call(REFLECT, STREAMS[-1][1], ends=False)
        token_ids = await client.tokenize(PROMPT)
        assert await asyncio.wait_for(client.detokenize(token_ids), DEADLINE_S) == PROMPT


async def test_watchers_of_health_are_limited_per_connection(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS_PER_CONNECTION", 2)
    own_connection = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        serve() as server,
        grpc.aio.insecure_channel(server.target, own_connection) as channel,
        grpc.aio.insecure_channel(server.target, own_connection) as other,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        other_stub: Any = health_pb2_grpc.HealthStub(other)
        watches = [stub.Watch(HEALTH) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="has 2 watchers of health already") as refused:
            await stub.Watch(HEALTH).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other_stub.Watch(HEALTH).read()).status == SERVING
        watches[0].cancel()

        async def is_watched() -> bool:
            try:
                return bool((await stub.Watch(HEALTH).read()).status == SERVING)
            except grpc.aio.AioRpcError:
                return False

        await eventually(is_watched)
