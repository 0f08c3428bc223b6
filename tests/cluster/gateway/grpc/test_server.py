"""Requests to the gateway over loopback gRPC, with the real scheduler and a tiny model."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from narrowing import instance_of
from serving import PROMPT, ServerFactory, eventually, until_free

from quire.cluster.client.client import AsyncClient, Client
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished, RequestStarted
from quire.cluster.text.requests.request import RequestChecker
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.errors import (
    InvalidRequest,
    ModelNotFound,
)
from quire.proto.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


async def test_stream_and_unary_return_the_same_output(serve: ServerFactory) -> None:
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


async def test_server_waits_for_calls_of_all_methods_together(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[str] = []
    monkeypatch.setattr(
        grpc.aio.Server,
        "add_registered_method_handlers",
        lambda server, name, handlers: registered.append(name),
    )
    async with serve() as server, AsyncClient(server.target) as client:
        assert (await client.models())[0].name == "tiny"
    assert registered == []


async def test_synchronous_client_returns_the_same_results(serve: ServerFactory) -> None:
    def check(target: str) -> None:
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

    async with serve() as server:
        await asyncio.to_thread(check, server.target)


async def test_invalid_requests_raise_and_the_server_continues(serve: ServerFactory) -> None:
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
async def test_status_details_name_the_field(
    serve: ServerFactory, sampling: dict[str, Any], field: str
) -> None:
    """google.rpc.BadRequest names the invalid field, for clients in any language."""
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
        assert (info.reason, info.domain) == ("INVALID_REQUEST", "quire")
        assert bad_request.field_violations[0].field == field


async def test_request_without_prompt_is_rejected(serve: ServerFactory) -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="prompt: is missing"):
            await stub.Generate(inference_pb2.GenerateRequest())


async def test_stop_string_ends_the_sequence_in_the_scheduler(serve: ServerFactory) -> None:
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

        await until_free(client)


async def test_logprobs_and_seed_work_over_grpc(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        params = SamplingParams(max_tokens=8, seed=-7, logprobs=3, ignore_eos=True)
        results = await asyncio.gather(client.generate(PROMPT, params), client.generate(PROMPT, params))
        first, second = (result.outputs[0] for result in results)
        assert first.token_ids == second.token_ids
        assert first.logprobs is not None
        assert len(first.logprobs) == len(first.token_ids) == 8
        for token_id, entry in zip(first.token_ids, first.logprobs, strict=True):
            by_rank = {each.rank: each.logprob for each in entry.values()}
            assert {1, 2, 3} <= set(by_rank)
            assert sorted(by_rank.values(), reverse=True) == [by_rank[rank] for rank in sorted(by_rank)]
            assert entry[token_id].logprob <= by_rank[1] + 1e-6 <= 1e-5


async def test_slow_reader_gets_merged_updates(serve: ServerFactory) -> None:
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


async def test_two_hundred_concurrent_streams_return_equal_outputs(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        alone = await client.generate([5, 6, 7], GREEDY)

        async def stream(number: int) -> tuple[int, ...]:
            events = client.generate_stream([5, 6, 7], GREEDY, request_id=f"r{number}")
            return tuple([t async for e in events if isinstance(e, CompletionDelta) for t in e.token_ids])

        results = await asyncio.gather(*map(stream, range(200)))
        assert set(results) == {tuple(alone.outputs[0].token_ids)}

        await until_free(client)
