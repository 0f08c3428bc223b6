"""Calls that are repeated or resumed: each request runs once, and every reader gets exactly the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
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
from tcp_proxy import TcpProxy, tcp_proxy

from quire import AsyncClient, Client, SamplingParams
from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.cluster.gateway.generation.retention import RetentionLimits
from quire.cluster.text.requests.outputs import CompletionDelta, StreamEvent
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.errors import (
    DuplicateRequest,
    InvalidRequest,
    QuireError,
    RequestAborted,
    RequestNotFound,
    ServerUnreachable,
)

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
TWO = SamplingParams(n=2, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=1)
# A connection's last bytes may come after the end of the call: its trailers, and acknowledgments.
CLOSING_BYTES = 250
SHORT_WINDOW = RetentionLimits(resume_window_s=0.3)


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    values: dict[str, Any] = {"text": PROMPT, "sampling": sampling, "request_id": "r"}
    return inference_pb2.GenerateRequest(**values | fields)


@asynccontextmanager
async def inference(target: str) -> AsyncIterator[Any]:
    """A stub whose errors are quire's."""
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            yield inference_pb2_grpc.InferenceStub(channel)
        except grpc.aio.AioRpcError as error:
            raise from_grpc_error(error, target) from error


async def read(stream: Any) -> list[inference_pb2.GenerateEvent]:
    return [event async for event in stream]


async def rest(stream: Any) -> list[inference_pb2.GenerateEvent]:
    """The events of a stream of which some were read with `read`."""
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def text_of(events: list[inference_pb2.GenerateEvent]) -> str:
    return "".join(event.delta.text for event in events)


async def test_repeat_reads_the_same_events_of_a_running_and_of_a_finished_request(
    serve: ServerFactory,
) -> None:
    async with serve() as server, inference(server.target) as stub:
        before = (await server.replica.status(DEADLINE_S)).num_finished  # canaries
        first = stub.GenerateStream(request())
        await first.read()
        running, repeated = await asyncio.gather(rest(first), read(stub.GenerateStream(request())))
        later = await read(stub.GenerateStream(request()))
        whole = await stub.Generate(request())
        assert running == repeated[1:] == later[1:]
        assert [event.sequence_number for event in later] == list(range(len(later)))
        assert whole.outputs[0].text == text_of(later)
        assert (await server.replica.status(DEADLINE_S)).num_finished == before + 1


async def test_resume_sends_exactly_the_rest_after_every_event(serve: ServerFactory) -> None:
    async with serve() as server, inference(server.target) as stub:
        for request_id, sampling in (
            ("one", inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)),
            ("two", inference_pb2.SamplingParams(n=2, max_tokens=NUM_TOKENS, prompt_logprobs=1)),
        ):
            call = request(request_id=request_id, sampling=sampling)
            whole = await read(stub.GenerateStream(call))
            for number in range(len(whole)):
                call.after_sequence_number = number
                assert await read(stub.GenerateStream(call)) == whole[number + 1 :]
            call.after_sequence_number = len(whole)
            with pytest.raises(grpc.aio.AioRpcError, match=f"the last event so far has {len(whole) - 1}"):
                await read(stub.GenerateStream(call))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"text": "other"}, DuplicateRequest),
        ({"cache_salt": "other"}, DuplicateRequest),
        ({"priority": 1}, DuplicateRequest),
        ({"sampling": inference_pb2.SamplingParams(temperature=0.5)}, DuplicateRequest),
        ({"request_id": "unknown", "after_sequence_number": 0}, RequestNotFound),
        ({"tenant": "other", "after_sequence_number": 0}, RequestNotFound),
        ({"after_sequence_number": -1}, InvalidRequest),
        ({"request_id": "", "after_sequence_number": 0}, InvalidRequest),
        ({"request_id": "", "resumable": True}, InvalidRequest),
    ],
)
async def test_other_content_or_unknown_request_is_refused(
    serve: ServerFactory, fields: dict[str, Any], kind: type[QuireError]
) -> None:
    async with serve() as server:
        async with inference(server.target) as stub:
            await stub.Generate(request())
        with pytest.raises(kind):
            async with inference(server.target) as stub:
                await stub.Generate(request(**fields))


async def test_failed_request_runs_again_but_its_resume_raises_the_error(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        events = client.generate_stream(PROMPT, ENDLESS, request_id="r")
        await first_delta(events)
        await client.abort("r")
        with pytest.raises(RequestAborted):
            await drain(events)
        async with inference(server.target) as stub:
            call = client._generate_stream(PROMPT, ENDLESS, {"request_id": "r"}).request
            call.after_sequence_number = 0
            with pytest.raises(grpc.aio.AioRpcError, match="was aborted"):
                await read(stub.GenerateStream(call))
        events = client.generate_stream(PROMPT, ENDLESS, request_id="r")
        await first_delta(events)
        await events.aclose()
        await until_free(client)


async def test_resumable_request_without_reader_ends_after_the_window(serve: ServerFactory) -> None:
    async with (
        serve(retention=SHORT_WINDOW) as server,
        AsyncClient(server.target) as observer,
        tcp_proxy(server.target) as proxy,
    ):
        server.brake.slow_down()
        client = AsyncClient(proxy.address)
        await first_delta(client.generate_stream(PROMPT, ENDLESS, request_id="r"))
        await client.close()
        assert server.replica.num_running == 1
        await until_free(observer)
        assert server.replica.num_running == 0
        await until_free(observer)


async def test_request_that_is_not_resumable_ends_with_its_connection(serve: ServerFactory) -> None:
    """A resumable request would run to its end, because the window is longer."""
    limits = RetentionLimits(resume_window_s=3600.0)
    async with serve(retention=limits) as server, AsyncClient(server.target) as observer:
        server.brake.slow_down()
        async with AsyncClient(server.target) as client:
            await first_delta(client.generate_stream(PROMPT, ENDLESS, request_id="r", resumable=False))
        await until_free(observer)
        assert len(server.brake.steps) < NUM_ENDLESS_TOKENS


@pytest.mark.parametrize("sampling", [GREEDY, TWO], ids=["one", "two"])
async def test_async_client_survives_a_break_after_every_event(
    serve: ServerFactory, sampling: SamplingParams
) -> None:
    async with serve() as server, tcp_proxy(server.target) as proxy, AsyncClient(proxy.address) as client:
        whole = [event async for event in client.generate_stream(PROMPT, sampling)]
        for broken_after in range(len(whole)):
            events: list[StreamEvent] = []
            async for event in client.generate_stream(PROMPT, sampling):
                if len(events) == broken_after:
                    proxy.break_connections()
                events.append(event)
            assert joined(events) == joined(whole)
            assert numbers(events) == list(range(1, len(numbers(events)) + 1))
        assert proxy.num_connections > 2
        await until_free(client)


async def test_async_client_survives_a_connection_cut_at_any_byte(serve: ServerFactory) -> None:
    """The steps are shorter than the message of a delta, so that every delta is lost once, and cut in the middle."""
    async with serve() as server, tcp_proxy(server.target) as proxy:
        async with AsyncClient(proxy.address) as client:
            whole = [event async for event in client.generate_stream(PROMPT, GREEDY)]
        for num_bytes in range(0, proxy.num_bytes - CLOSING_BYTES, 50):
            async with AsyncClient(proxy.address) as client:
                proxy.cut_after, before = num_bytes, proxy.num_connections - proxy.num_cuts
                proxy.break_connections()  # gRPC may still have that of the last client
                events = [event async for event in client.generate_stream(PROMPT, GREEDY)]
                assert proxy.num_connections - proxy.num_cuts > before
            assert joined(events) == joined(whole)
            assert numbers(events) == list(range(1, len(numbers(events)) + 1))
        assert proxy.num_cuts > 1  # fewer than there are places, if a slow machine sends fewer bytes


async def test_client_waits_for_a_slow_connection(serve: ServerFactory) -> None:
    """As over TLS on another continent, or of a server without a processor."""
    async with serve() as server, tcp_proxy(server.target) as proxy:
        delays = iter((0.7, 0.7))
        proxy.delay_s = lambda: next(delays, 0.0)
        async with AsyncClient(proxy.address) as client:
            output = await client.generate(PROMPT, GREEDY)
        assert len(output.outputs[0].token_ids) == NUM_TOKENS
        assert next(delays, None) is None


async def test_unary_call_survives_a_connection_cut_at_any_byte(serve: ServerFactory) -> None:
    async with serve() as server, tcp_proxy(server.target) as proxy:
        async with AsyncClient(proxy.address) as client:
            whole = await client.generate(PROMPT, GREEDY)
        for num_bytes in range(0, proxy.num_bytes - CLOSING_BYTES, 100):
            async with AsyncClient(proxy.address) as client:
                proxy.cut_after, before = num_bytes, proxy.num_connections - proxy.num_cuts
                proxy.break_connections()  # gRPC may still have that of the last client
                output = await client.generate(PROMPT, GREEDY)
                assert proxy.num_connections - proxy.num_cuts > before
            assert output.outputs == whole.outputs
        assert proxy.num_cuts > 1


async def test_synchronous_client_survives_a_break_after_every_event(serve: ServerFactory) -> None:
    def check(proxy: TcpProxy, loop: asyncio.AbstractEventLoop) -> None:
        with Client(proxy.address) as client:
            whole = list(client.generate_stream(PROMPT, GREEDY))
            for broken_after in range(len(whole)):
                events: list[StreamEvent] = []
                for event in client.generate_stream(PROMPT, GREEDY):
                    if len(events) == broken_after:
                        loop.call_soon_threadsafe(proxy.break_connections)
                    events.append(event)
                assert joined(events) == joined(whole)
            loop.call_soon_threadsafe(proxy.break_connections)
            assert client.generate(PROMPT, GREEDY).outputs[0].token_ids == joined(whole)[0][1]

    async with serve() as server, tcp_proxy(server.target) as proxy:
        await asyncio.to_thread(check, proxy, asyncio.get_running_loop())


async def test_server_that_has_forgotten_the_request_computes_it_again(serve: ServerFactory) -> None:
    limits = RetentionLimits(resume_window_s=0.0, retention_s=0.0)
    async with (
        serve(retention=limits) as server,
        tcp_proxy(server.target) as proxy,
        AsyncClient(proxy.address) as client,
    ):
        sampling = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0)
        whole = [event async for event in client.generate_stream(PROMPT, sampling, request_id="r")]
        server.brake.slow_down()
        stream = client.generate_stream(PROMPT, sampling, request_id="r")
        events = [await anext(stream), await anext(stream)]
        await asyncio.to_thread(server.brake.catch)
        proxy.break_connections()

        async def has_ended() -> bool:
            return not server.replica.num_running

        await eventually(has_ended)
        server.brake.speed_up()
        server.brake.release()
        events += [event async for event in stream]
        assert joined(events) == joined(whole)


async def test_client_gives_up_where_the_request_cannot_be_continued(serve: ServerFactory) -> None:
    """A call that does not tell what it has received, as that of an earlier release."""
    async with serve() as server:
        with pytest.raises(RequestNotFound, match="is not known here"):
            async with inference(server.target) as stub:
                await read(stub.GenerateStream(request(resumable=True, after_sequence_number=3)))


async def test_client_raises_at_once_where_no_server_runs() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
                await client.generate(PROMPT)


async def test_closed_stream_aborts_its_request_at_once(serve: ServerFactory) -> None:
    def close(target: str) -> None:
        with Client(target) as client:
            events = client.generate_stream(PROMPT, ENDLESS)
            next(events)
            events.close()

    async with serve() as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        await asyncio.to_thread(close, server.target)
        await until_free(client)
        task = asyncio.create_task(client.generate(PROMPT, ENDLESS))

        async def is_running() -> bool:
            return server.replica.num_running == 1

        await eventually(is_running)
        task.cancel()
        await asyncio.wait((task,))
        await until_free(client)
        assert len(server.brake.steps) < NUM_ENDLESS_TOKENS


def joined(events: list[StreamEvent]) -> list[tuple[str, list[int]]]:
    """The text and the tokens of each completion."""
    deltas = [event for event in events if isinstance(event, CompletionDelta)]
    indices = sorted({delta.index for delta in deltas})
    return [
        (
            "".join(delta.text for delta in deltas if delta.index == index),
            [token_id for delta in deltas if delta.index == index for token_id in delta.token_ids],
        )
        for index in indices
    ]


def numbers(events: list[StreamEvent]) -> list[int]:
    return [event.sequence_number for event in events if isinstance(event, CompletionDelta)]
