"""Requests that continue at another gateway: the client gets the rest of the same output, token for token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gateway_process import gateway_process
from local_replica import LocalReplica, local_replica
from local_server import LocalGateway, local_config, local_gateway
from serving import DEADLINE_S, PROMPT, first_delta
from tcp_proxy import tcp_proxy

from quire import AsyncClient, SamplingParams
from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.cluster.client.wire.request_messages import resume_position_to_message, sampling_to_message
from quire.cluster.client.wire.response_messages import event_from_message
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    PromptLogprobsDelta,
    RequestStarted,
    StreamEvent,
)
from quire.cluster.text.requests.resume_position import ResumePosition
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.errors import RequestNotFound

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    "drawn": SamplingParams(n=2, max_tokens=6, ignore_eos=True),
    "stop string": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=("e", "a", "o")),
    "logprobs": SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=0),
    "best of": SamplingParams(n=2, best_of=3, seed=3, max_tokens=5, ignore_eos=True),
    "beams": SamplingParams(n=2, beam_width=2, max_tokens=5),
}


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@asynccontextmanager
async def gateway_of(replica: LocalReplica) -> AsyncIterator[LocalGateway]:
    client = ReplicaClient(replica.address, "replica-0", heartbeat_s=0.1)
    async with local_gateway(replica.config, client) as gateway:
        await asyncio.wait_for(gateway.gateway.wait_ready(), DEADLINE_S)
        yield gateway


def request(sampling: SamplingParams, **fields: Any) -> inference_pb2.GenerateRequest:
    values: dict[str, Any] = {"text": PROMPT, "request_id": "r", "resumable": True} | fields
    return inference_pb2.GenerateRequest(sampling=sampling_to_message(sampling), **values)


async def read(target: str, call: inference_pb2.GenerateRequest) -> list[tuple[int, StreamEvent]]:
    """Return the numbered events of a call."""
    async with grpc.aio.insecure_channel(target) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).GenerateStream(call)
        try:
            return [(message.sequence_number, event_from_message(message)) async for message in stream]
        except grpc.aio.AioRpcError as error:
            raise from_grpc_error(error, target) from error


def outcome(events: list[StreamEvent]) -> dict[str, Any]:
    """Return what the events add up to, however the output was cut into them; without times."""
    parts: dict[str, Any] = {"prompt": [], "deltas": 0}
    for event in events:
        if isinstance(event, CompletionDelta):
            parts["deltas"] += 1
            assert event.sequence_number == parts["deltas"]
            output = parts.setdefault(f"output {event.index}", {"text": "", "tokens": [], "logprobs": []})
            output["text"] += event.text
            output["tokens"] += event.token_ids
            output["logprobs"] += event.logprobs
        elif isinstance(event, PromptLogprobsDelta):
            parts["prompt"] += event.logprobs
        elif isinstance(event, CompletionFinished):
            assert f"end {event.index}" not in parts
            parts[f"end {event.index}"] = (
                event.finish_reason, event.stop_reason, event.usage.completion_tokens, event.cumulative_logprob,
                event.score,
            )  # fmt: skip
    del parts["deltas"]
    return parts


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_another_gateway_continues_after_every_event(model: Path, kind: str) -> None:
    with local_replica(local_config(model)) as replica:
        async with gateway_of(replica) as first:
            call = request(SAMPLINGS[kind])
            whole = await read(first.target, call)
            events = [event for _, event in whole]
            assert isinstance(events[0], RequestStarted)
            async with gateway_of(replica) as second:
                for number, received in enumerate(prefixes(events)):
                    resumed = request(SAMPLINGS[kind], after_sequence_number=number)
                    resumed.received.CopyFrom(resume_position_to_message(received))
                    rest = await read(second.target, resumed)
                    assert [each for each, _ in rest] == list(range(number + 1, number + 1 + len(rest)))
                    joined = events[: number + 1] + [event for _, event in rest]
                    assert outcome(joined) == outcome(events)


def prefixes(events: list[StreamEvent]) -> list[ResumePosition]:
    """Return what a client has after each event."""
    found, received = [], ResumePosition()
    for event in events:
        received.take(event)
        found.append(received.copy())
    return found


async def test_gateway_that_read_other_events_continues_after_the_tokens(model: Path) -> None:
    """The client returns to its first gateway, whose events have other boundaries than those of the second."""
    call = request(SAMPLINGS["drawn"])
    with local_replica(local_config(model)) as replica:
        async with gateway_of(replica) as gateway:
            replica.brake.slow_down()
            while not is_in_parts(events := [event for _, event in await read(gateway.target, call)]):
                call.request_id += "r"  # the gateway read all tokens at once
            replica.brake.speed_up()
            merged = [events[0], *merge_first_deltas(events[1:])]
            assert len(merged) < len(events)
            received = prefixes(merged)[1]
            call.after_sequence_number = 1
            call.received.CopyFrom(resume_position_to_message(received))
            rest = [event for _, event in await read(gateway.target, call)]
            assert outcome(merged[:2] + renumbered(rest)) == outcome(events)


def is_in_parts(events: list[StreamEvent]) -> bool:
    """Return whether the first completion has several deltas."""
    indices = [event.index for event in events if isinstance(event, CompletionDelta)]
    return indices.count(indices[0]) > 1


def merge_first_deltas(events: list[StreamEvent]) -> list[StreamEvent]:
    """Join the first two deltas of the first completion, as if they had been read late."""
    first = next(event for event in events if isinstance(event, CompletionDelta))
    others = [event for event in events if event is not first]
    second = next(e for e in others if isinstance(e, CompletionDelta) and e.index == first.index)
    joined = CompletionDelta(
        first.index, first.text + second.text, first.token_ids + second.token_ids, sequence_number=1
    )
    return [joined, *(event for event in others if event is not second)]


def renumbered(events: list[StreamEvent]) -> list[StreamEvent]:
    deltas = [event.sequence_number for event in events if isinstance(event, CompletionDelta)]
    assert deltas == list(range(2, 2 + len(deltas)))
    return events


async def test_no_tenant_continues_the_request_of_another_one(model: Path) -> None:
    call = request(SAMPLINGS["drawn"], tenant="a")
    with local_replica(local_config(model)) as replica:
        async with gateway_of(replica) as first, gateway_of(replica) as second:
            events = [event for _, event in await read(first.target, call)]
            stolen = request(SAMPLINGS["drawn"], tenant="b", after_sequence_number=len(events) - 3)
            stolen.received.CopyFrom(resume_position_to_message(prefixes(events)[-3]))
            with pytest.raises(RequestNotFound, match="its output differs from what was received"):
                await read(second.target, stolen)


async def test_client_of_two_gateways_continues_at_the_next_one(model: Path) -> None:
    sampling = SamplingParams(n=2, max_tokens=100, ignore_eos=True)

    async def follow(replica: LocalReplica, first: str, second: str) -> None:
        async with (
            tcp_proxy(first) as proxy,
            AsyncClient(f"{proxy.address}, {second}") as client,
            AsyncClient(second) as observer,
        ):
            replica.brake.slow_down()
            stream = client.generate_stream(PROMPT, sampling, request_id="r")
            events: list[StreamEvent] = [await anext(stream), await first_delta(stream)]
            await asyncio.to_thread(replica.brake.catch)
            proxy.break_connections()
            replica.brake.speed_up()
            replica.brake.release()
            events += [event async for event in stream]
            assert proxy.num_connections == 1
            # A call that begins anew gets another run: the second gateway has only the end of this one.
            whole = [event async for event in observer.generate_stream(PROMPT, sampling, request_id="r")]
            assert outcome(events) == outcome(whole)

    with local_replica(local_config(model)) as replica:
        async with gateway_of(replica) as first, gateway_of(replica) as second:
            await follow(replica, first.target, second.target)


@pytest.mark.slow  # the process of the gateway imports for some seconds
async def test_client_of_two_gateways_survives_the_kill_of_one(model: Path) -> None:
    sampling = SamplingParams(n=2, seed=3, max_tokens=100, ignore_eos=True)

    with local_replica(local_config(model)) as replica, gateway_process(model, replica.address) as peer:
        address, process = peer
        async with (
            gateway_of(replica) as survivor,
            AsyncClient(survivor.target) as observer,
            AsyncClient(f"{address}, {survivor.target}") as client,
        ):
            whole = [event async for event in observer.generate_stream(PROMPT, sampling)]
            replica.brake.slow_down()
            stream = client.generate_stream(PROMPT, sampling)
            events: list[StreamEvent] = [await anext(stream), await first_delta(stream)]
            output = asyncio.create_task(client.generate(PROMPT, sampling))
            await asyncio.to_thread(replica.brake.catch)  # the stream cannot end before its gateway does
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, DEADLINE_S)
            replica.brake.speed_up()
            replica.brake.release()
            events += [event async for event in stream]
            assert outcome(events) == outcome(whole)
            for each in (await output).outputs:
                assert each.token_ids == outcome(whole)[f"output {each.index}"]["tokens"]
            assert await client.is_ready()
