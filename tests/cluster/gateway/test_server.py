"""The gateway over real loopback gRPC, with the real scheduler and a tiny model."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from narrowing import instance_of

from quire.cluster.api.tokens import Token
from quire.cluster.client.async_client import AsyncClient
from quire.cluster.client.client import Client
from quire.cluster.gateway.security import Security
from quire.cluster.gateway.server import Gateway
from quire.cluster.requests.outputs import CompletionDelta, CompletionFinished, RequestStarted, StreamEvent
from quire.cluster.requests.request import RequestChecker
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.errors import (
    ConfigError,
    DeadlineExpired,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ReplicaUnavailable,
    RequestAborted,
    Unauthenticated,
)
from quire.proto.sampling import SamplingParams
from quire.proto.stream import CacheReport, ReplicaStatus

PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
DEADLINE_S = 30.0

ServerFactory = Callable[..., Any]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


async def eventually(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Wait until the condition holds, DEADLINE_S at most."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def first_delta(events: AsyncIterator[StreamEvent]) -> CompletionDelta:
    async for event in events:
        if isinstance(event, CompletionDelta):
            return event
    raise AssertionError("the stream ended without a delta")


async def drain(events: AsyncIterator[StreamEvent]) -> None:
    async for _ in events:
        pass


def test_stream_and_unary_return_the_same_output(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            whole = await client.generate(PROMPT, GREEDY)
            events = [event async for event in client.generate_stream(PROMPT, GREEDY, request_id="mine")]
        started, *updates, finished = events
        assert isinstance(started, RequestStarted)
        assert isinstance(finished, CompletionFinished)
        assert (started.request_id, started.model) == ("mine", "tiny")
        deltas = [instance_of(CompletionDelta, event) for event in updates]
        (completion,) = whole.outputs
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [token_id for delta in deltas for token_id in delta.token_ids] == completion.token_ids
        assert [delta.sequence_number for delta in deltas] == list(range(1, len(deltas) + 1))
        assert finished.finish_reason == completion.finish_reason
        assert finished.usage.prompt_tokens == started.prompt_tokens == whole.usage.prompt_tokens
        assert finished.usage.completion_tokens == len(completion.token_ids)
        assert finished.timings.decode_s > 0

    run(scenario())


def test_synchronous_client_returns_the_same_results(serve: ServerFactory) -> None:
    def ask(target: str) -> None:
        with Client(target) as client:
            assert client.is_ready()
            assert client.models()[0].name == "tiny"
            assert client.status()[0].ready
            whole = client.generate(PROMPT, GREEDY)
            deltas = [
                event
                for event in client.generate_stream(PROMPT, GREEDY)
                if isinstance(event, CompletionDelta)
            ]
            assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
            assert not client.abort("nobody")
            with pytest.raises(InvalidRequest, match="empty") as caught:
                client.generate("")
            assert caught.value.field == "prompt"

    async def scenario() -> None:
        async with serve() as server:
            await asyncio.to_thread(ask, server.target)

    run(scenario())


def test_invalid_requests_raise_and_the_server_continues(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve(num_kv_blocks=9) as server, AsyncClient(server.target) as client:
            context_len, pool_len = server.config.model.max_model_len, 8 * 16
            with pytest.raises(ModelNotFound, match="'gpt' is not served here; 'tiny' is"):
                await client.generate(PROMPT, model="gpt")
            for prompt, said in (
                ("", "is empty"),
                ([], "is empty"),
                ([1] * context_len, f"{context_len} tokens.*context of {context_len}"),
                ([1] * pool_len, f"{pool_len} tokens.*KV memory of {pool_len}"),
            ):
                with pytest.raises(InvalidRequest, match=said) as caught:
                    await client.generate(prompt)
                assert caught.value.field == "prompt"
            with pytest.raises(InvalidRequest, match="is 99999") as caught:
                await client.generate([1, 99999])
            assert caught.value.field == "prompt[1]"
            assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids

    run(scenario())


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens"),
        ({"logprobs": 1000}, "sampling.logprobs"),
        ({"stop": [""]}, "sampling.stop"),
        ({"stop_token_ids": [-5]}, "sampling.stop_token_ids[0]"),
    ],
)
def test_status_details_name_the_field(serve: ServerFactory, sampling: dict[str, Any], field: str) -> None:
    """google.rpc.BadRequest names the invalid field, for clients in any language."""

    async def scenario() -> None:
        async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            message = inference_pb2.GenerateRequest(
                text=PROMPT, sampling=inference_pb2.SamplingParams(**sampling)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            status = status_pb2.Status.FromString(
                dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
            )
            info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            assert status.details[0].Unpack(info)
            assert status.details[1].Unpack(bad_request)
            assert (info.reason, info.domain) == ("InvalidRequest", "quire")
            assert bad_request.field_violations[0].field == field

    run(scenario())


def test_request_without_prompt_is_rejected(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="prompt: is missing"):
                await stub.Generate(inference_pb2.GenerateRequest())

    run(scenario())


@pytest.mark.parametrize("how", ["close", "disconnect", "deadline"])
def test_broken_stream_frees_its_blocks(serve: ServerFactory, how: str) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as observer:
            before = (await observer.status())[0].kv.num_used_blocks
            client = AsyncClient(server.target)
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
            num_steps = len(server.brake.steps)
            server.brake.release()

            async def is_free() -> bool:
                return (await observer.status())[0].kv.num_used_blocks == before

            await eventually(is_free)
            # Only steps planned before the abort arrived have run.
            assert len(server.brake.steps) <= num_steps + 2
            await client.close()

    run(scenario())


def test_abort_ends_the_stream_and_frees_its_blocks(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            events = client.generate_stream(PROMPT, ENDLESS, request_id="long")
            await first_delta(events)
            with pytest.raises(DuplicateRequest, match="'long' is running already"):
                await client.generate(PROMPT, GREEDY, request_id="long")
            assert await client.abort("long")
            with pytest.raises(RequestAborted, match="'long' was aborted"):
                await drain(events)
            assert not await client.abort("long")

            async def is_free() -> bool:
                return (await client.status())[0].kv.num_used_blocks == 0

            await eventually(is_free)
            assert (await client.generate(PROMPT, GREEDY, request_id="long")).request_id == "long"

    run(scenario())


def test_stop_string_ends_the_sequence_in_the_scheduler(serve: ServerFactory) -> None:
    async def scenario() -> None:
        prompt = list(range(20))
        async with serve() as server, AsyncClient(server.target) as client:
            whole = (await client.generate(prompt, GREEDY)).outputs[0].text
            stop = whole[5:8]
            params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=(stop,))
            (output,) = (await client.generate(prompt, params)).outputs
            assert output.text == whole[: whole.find(stop)]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            assert output.usage.completion_tokens == len(output.token_ids)
            assert output.timings.decode_s > 0
            assert output.usage.cached_tokens == 16  # the first block, cached by the first request

            async def is_free() -> bool:
                return (await client.status())[0].kv.num_used_blocks == 0

            await eventually(is_free)

    run(scenario())


def test_logprobs_and_seed_work_over_grpc(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            params = SamplingParams(max_tokens=8, seed=-7, logprobs=3, ignore_eos=True)
            results = await asyncio.gather(client.generate(PROMPT, params), client.generate(PROMPT, params))
            first, second = (result.outputs[0] for result in results)
            assert first.token_ids == second.token_ids
            assert first.logprobs is not None
            assert len(first.logprobs) == len(first.token_ids) == 8
            for token_id, entry in zip(first.token_ids, first.logprobs, strict=True):
                by_rank = {each.rank: each.logprob for each in entry.values() if each.rank is not None}
                assert sorted(by_rank) == [1, 2, 3]
                assert entry[token_id].logprob <= by_rank[1] + 1e-6 <= 1e-5

    run(scenario())


def test_health_follows_the_replica(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with (
            serve(ready=False, silence_timeout_s=3.0) as server,
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
            running = client.generate_stream(PROMPT, ENDLESS)
            await first_delta(running)
            server.brake.hold()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(ReplicaUnavailable, match="replica-0 failed: it has been silent for"):
                await drain(running)
            server.brake.release()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await client.is_ready()
            await client.close()

    run(scenario())


def test_failed_replica_stays_failed_despite_later_statuses(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            running = client.generate_stream(PROMPT, ENDLESS)
            await first_delta(running)
            # The replica still runs, so its statuses keep coming, like those sent just before a failure.
            server.replica.fail("rank 1 failed at step 7: killed")
            messages: asyncio.Queue[ReplicaStatus | CacheReport] = asyncio.Queue()
            server.replica.add_listener(messages.put_nowait)
            with pytest.raises(ReplicaUnavailable, match="replica-0 failed: rank 1 failed at step 7: killed"):
                await drain(running)
            while not isinstance(await asyncio.wait_for(messages.get(), 20.0), ReplicaStatus):
                pass
            assert server.replica.has_failed
            assert "rank 1 failed" in server.replica.problem
            assert "rank 1 failed" in await server.replica.wait_until_failed()
            with pytest.raises(ReplicaUnavailable, match="rank 1 failed"):
                await client.generate(PROMPT, GREEDY)
            assert not await client.is_ready()

    run(scenario())


def test_ended_replica_fails_its_requests_and_rejects_new_ones(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            events = client.generate_stream(PROMPT, ENDLESS)
            await first_delta(events)
            await asyncio.to_thread(server.stop_replica)
            with pytest.raises(ReplicaUnavailable, match="replica-0 is shutting down"):
                await drain(events)
            with pytest.raises(ReplicaUnavailable, match="replica-0"):
                await client.generate(PROMPT, GREEDY)
            assert not await client.is_ready()

    run(scenario())


def test_silent_replica_fails_its_requests(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve(silence_timeout_s=0.5) as server, AsyncClient(server.target) as client:
            server.brake.hold()
            with pytest.raises(ReplicaUnavailable, match="replica-0 failed: it has been silent for"):
                await client.generate(PROMPT, GREEDY)

    run(scenario())


def test_slow_reader_gets_merged_updates(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server:
            checker = RequestChecker(server.config, server.tokenizer)
            params = SamplingParams(max_tokens=50, ignore_eos=True)
            running = server.replica.submit(checker.check([1, 2, 3], params))

            async def is_done() -> bool:
                return server.replica.num_running == 0

            await eventually(is_done)
            ((index, update),) = [item async for item in running]
            assert index == 0
            assert len(update.token_ids) == 50
            assert update.finish is not None

    run(scenario())


def test_two_hundred_concurrent_streams_return_equal_outputs(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            alone = await client.generate([5, 6, 7], GREEDY)

            async def stream(number: int) -> tuple[int, ...]:
                events = client.generate_stream([5, 6, 7], GREEDY, request_id=f"r{number}")
                return tuple([t async for e in events if isinstance(e, CompletionDelta) for t in e.token_ids])

            results = await asyncio.gather(*map(stream, range(200)))
            assert set(results) == {tuple(alone.outputs[0].token_ids)}

            async def is_free() -> bool:
                return (await client.status())[0].kv.num_used_blocks == 0

            await eventually(is_free)

    run(scenario())


def test_full_queue_rejects_requests(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve(max_num_seqs=1, max_queue_len=2) as server, AsyncClient(server.target) as client:
            first = client.generate_stream(PROMPT, ENDLESS)
            await first_delta(first)
            server.brake.catch()
            calls = [asyncio.ensure_future(client.generate(PROMPT, GREEDY)) for _ in range(8)]

            async def have_all_come() -> bool:
                return server.replica.num_running == 1 + len(calls)

            await eventually(have_all_come)
            server.brake.release()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(result, Overloaded) for result in results) >= 1
            assert sum(not isinstance(result, Exception) for result in results) >= 2
            await first.aclose()

    run(scenario())


def test_every_call_but_health_needs_a_token(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve(security=Security(tokens=(Token(b"one"), Token(b"two")))) as server:
            async with AsyncClient(server.target, token="two") as client:
                assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
                assert [event async for event in client.generate_stream(PROMPT, GREEDY)]
            for token in (None, "three", ""):
                async with AsyncClient(server.target, token=token) as client:
                    assert await client.is_ready()
                    for call in (client.models(), client.status(), client.generate(PROMPT)):
                        with pytest.raises(Unauthenticated):
                            await call
                    with pytest.raises(Unauthenticated):
                        await anext(client.generate_stream(PROMPT))

    run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_calls_work_over_tls(serve: ServerFactory, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command.split() + names, check=True, capture_output=True, timeout=30)

    async def scenario() -> None:
        async with serve(security=Security.load(tls_cert=certificate, tls_key=key)) as server:
            async with AsyncClient(server.target, tls_ca=certificate) as client:
                assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
            async with AsyncClient(server.target) as client:
                with pytest.raises(ReplicaUnavailable):
                    await client.generate(PROMPT, GREEDY)
            broken = Security(certificate=(b"no certificate", b"no key"))
            gateway = Gateway(server.models, security=broken)
            with pytest.raises(ConfigError, match="or the TLS certificate or key is not valid"):
                await gateway.start()

    run(scenario())


def test_reflection_lists_the_services(serve: ServerFactory) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def scenario() -> None:
        async with (
            serve(ready=False, silence_timeout_s=3.0) as server,
            grpc.aio.insecure_channel(server.target) as channel,
        ):
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            response = await call.read()
            names = {service.name for service in response.list_services_response.service}
            assert {"quire.v1.Inference", "quire.v1.Admin", "grpc.health.v1.Health"} <= names
            call.cancel()

    run(scenario())


def test_port_in_use_raises(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve(ready=False) as server:
            second = Gateway(server.models, server.target)
            with pytest.raises(ConfigError, match=f"cannot listen on {server.target}"):
                await second.start()

    run(scenario())


def test_unreachable_server_raises_replica_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"127.0.0.1:{port}", timeout_s=20) as client:
        assert not client.is_ready()
        with pytest.raises(ReplicaUnavailable, match=f"127.0.0.1:{port}"):
            client.generate("hello")
