"""Tokenization, load, cache flush, events, health of each model, connection age and the order of a shutdown."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from narrowing import instance_of
from serving import DEADLINE_S, ENDLESS, PROMPT, ServerFactory, eventually, first_delta, until_free
from tcp_proxy import tcp_proxy

from quire import AsyncClient, Chat, Client, SamplingParams
from quire.cluster.client.wire.status import ReplicaInfo
from quire.cluster.gateway.grpc.health import model_service
from quire.cluster.gateway.grpc.server import Gateway
from quire.proto.errors import InvalidRequest, ModelNotFound, ShuttingDown
from quire.proto.stream import FlushCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG_PROMPT = list(range(2, 40))


async def test_tokenize_and_detokenize_are_inverse_and_agree_with_requests(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        token_ids = await client.tokenize(PROMPT)
        assert token_ids == server.tokenizer.encode(PROMPT)
        assert await client.detokenize(token_ids) == PROMPT
        assert await client.tokenize("") == []
        events = client.generate_stream(PROMPT, GREEDY)
        assert (await anext(events)).prompt_tokens == len(token_ids)  # type: ignore[union-attr]
        await events.aclose()
        with pytest.raises(InvalidRequest, match=r"token_ids\[1\]: is 99999"):
            await client.detokenize([1, 99999])
        with pytest.raises(InvalidRequest, match="chat"):
            await client.tokenize(Chat([]))
        with pytest.raises(ModelNotFound):
            await client.tokenize(PROMPT, model="other")


async def test_server_info_and_load_describe_the_server(serve: ServerFactory) -> None:
    def check(target: str) -> None:
        with Client(target) as client:
            info = client.server_info()
            assert [model.name for model in info.models] == ["tiny"]
            assert (info.resume_window_s, info.retention_s) == (10.0, 60.0)
            assert info.version
            (load,) = client.load()
            assert (load.model, load.num_ready_replicas) == ("tiny", 1)
            assert (load.num_running, load.num_unplaced) == (0, 0)

    async with serve() as server:
        await asyncio.to_thread(check, server.target)


async def test_flush_cache_empties_the_prefix_cache(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:

        async def num_cached_tokens() -> int:
            return (await client.generate(LONG_PROMPT, GREEDY)).usage.cached_tokens

        assert await num_cached_tokens() == 0
        assert await num_cached_tokens() > 0
        assert await client.flush_cache() == ("replica-0",)
        assert await num_cached_tokens() == 0
        assert await num_cached_tokens() > 0
        server.brake.slow_down()
        running = client.generate_stream(LONG_PROMPT, ENDLESS)
        await first_delta(running)
        server.replica.send(FlushCache())  # while blocks are held; the scheduler audits itself
        await running.aclose()
        await until_free(client)
        server.brake.speed_up()
        assert await num_cached_tokens() == 0


async def test_events_report_the_replica_and_its_changes(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        events = client.watch_events()
        first = instance_of(ReplicaInfo, (await anext(events)).object)
        assert (first.replica_id, first.ready) == ("replica-0", True)
        server.brake.slow_down()
        running = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(running)
        server.be_silent()
        while instance_of(ReplicaInfo, (event := await anext(events)).object).ready:
            pass
        assert "silent" in instance_of(ReplicaInfo, event.object).problem
        assert not event.is_removed
        await running.aclose()
        await events.aclose()


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_is_reported_for_each_model(serve: ServerFactory) -> None:
    serving, unknown = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
    )
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=model_service("tiny")))
        assert (await watch.read()).status == serving
        assert await health_of(channel, model_service("tiny")) == serving
        model = server.models.remove("tiny")
        assert (await watch.read()).status == unknown
        watch.cancel()
        server.models.add(model)

        async def is_serving() -> bool:
            return await health_of(channel, "") == serving

        await eventually(is_serving)


async def test_shutdown_waits_for_requests_and_then_ends_them_with_its_reason(serve: ServerFactory) -> None:
    """A watcher of the health does not hold up the shutdown."""
    async with (
        serve() as server,
        AsyncClient(server.target) as client,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        fleet_events = client.watch_events()
        await anext(fleet_events)
        server.brake.slow_down()
        endless = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(endless)
        server.brake.hold()
        stopping = asyncio.create_task(server.gateway.stop(0.2))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for stream in (endless, fleet_events):
            with pytest.raises(ShuttingDown, match="the gateway stops"):
                await anext(aiter_without_deltas(stream))
        server.brake.release()
        await stopping
        assert server.replica.num_running == 0


async def test_shutdown_ends_calls_that_do_not_end_by_themselves(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated, since gRPC's server crashed at some of the moments at which such a call could end."""
    monkeypatch.setattr("quire.cluster.gateway.grpc.server.END_TIMEOUT_S", 0.01)
    async with serve() as server:
        for attempt in range(20):
            gateway = Gateway(server.services)
            async with grpc.aio.insecure_channel(await gateway.start()) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest())
                await watch.read()
                await gateway.stop(0.001 * attempt)
                with pytest.raises(grpc.aio.AioRpcError):
                    await read_to_end(watch)


async def test_shutdown_lets_a_running_request_finish(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        events = client.generate_stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        await first_delta(events)
        stopping = asyncio.create_task(server.gateway.stop(60))
        async with asyncio.timeout(DEADLINE_S):
            num_events = len([event async for event in events])
            await stopping
        assert num_events > 0


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def aiter_without_deltas(stream: Any) -> Any:
    """Read a stream to its error."""
    async for _ in stream:
        pass
    yield


async def test_stream_outlives_the_age_of_its_connection(serve: ServerFactory) -> None:
    """The server closes the connection under the stream, which continues over another one."""
    async with serve() as server:
        gateway = Gateway(server.services, max_connection_age_s=0.2, max_connection_age_grace_s=0.1)
        target = await gateway.start()
        try:
            async with tcp_proxy(target) as proxy, AsyncClient(proxy.address) as client:
                expected = await client.generate(PROMPT, GREEDY)
                server.brake.hold()
                reading = asyncio.create_task(client.generate(PROMPT, GREEDY, request_id="again"))

                async def has_connected_again() -> bool:
                    return proxy.num_connections >= 3  # the age of the second one is over as well

                await eventually(has_connected_again)
                server.brake.release()
                assert (await reading).outputs == expected.outputs
        finally:
            server.brake.release()
            await gateway.stop(0)
