"""RequestObserver: the calls that GenerationService reports, in order, and their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from local_replica import local_replica
from serving import DEADLINE_S, PROMPT

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.generation.generation import GenerationCall, GenerationService
from quire.cluster.gateway.routing.served_models import serve_single_replica
from quire.cluster.text.requests.observer import MoveCause, ObservedCall, Observers, RequestWatch
from quire.cluster.text.requests.outputs import CompletionDelta, StreamEvent
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.errors import InvalidRequest, ModelNotFound, RequestAborted
from quire.proto.sampling import SamplingParams


class Recorder:
    """RequestObserver and RequestWatch that lists the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def watch(self, call: ObservedCall) -> RequestWatch:
        self.calls.append(f"watch {call.request_id}")
        return self

    def on_accepted(self, model: str, request: Request) -> None:
        self.calls.append(f"accepted {model} {request.request_id}")

    def on_event(self, event: StreamEvent) -> None:
        self.calls.append(event)

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        self.calls.append(f"moved {replica_id} {cause}")

    def on_end(self, error: BaseException | None) -> None:
        self.calls.append(error)


def test_observers_pass_on_every_call_to_each() -> None:
    first, second = Recorder(), Recorder()
    watch = Observers(first, second).watch(GenerationCall("text", SamplingParams(), request_id="r"))
    watch.on_moved("replica-0", MoveCause.DRAIN)
    watch.on_end(None)
    assert first.calls == second.calls == ["watch r", "moved replica-0 drain", None]


async def test_service_reports_each_call_and_its_end(make_model: Callable[..., Path]) -> None:
    model = str(make_model("llama"))
    options = EngineOptions(model, served_model_name="tiny", device="cpu", num_kv_blocks=64)
    recorder = Recorder()

    async def _complete(service: GenerationService) -> None:
        call = GenerationCall(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), request_id="r")
        async with service.run(call) as generation:
            events = [event async for event in generation.events]
        assert recorder.calls == ["watch r", "accepted tiny r", *events[1:], None]
        deltas = [event for event in recorder.calls if isinstance(event, CompletionDelta)]
        assert sum(len(delta.token_ids) for delta in deltas) == 3

    async def _refuse(service: GenerationService) -> None:
        for call, kind in (
            (GenerationCall(PROMPT, SamplingParams(), model="other"), ModelNotFound),
            (GenerationCall([10**6], SamplingParams()), InvalidRequest),
        ):
            recorder.calls.clear()
            with pytest.raises(kind):
                async with service.run(call):
                    pass
            (_, error) = recorder.calls
            assert isinstance(error, kind)

    async def _leave(service: GenerationService) -> None:
        recorder.calls.clear()
        call = GenerationCall(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), request_id="left")
        with pytest.raises(asyncio.CancelledError):
            async with service.run(call):
                raise asyncio.CancelledError
        assert recorder.calls[:2] == ["watch left", "accepted tiny left"]
        assert isinstance(recorder.calls[-1], asyncio.CancelledError)

    async def _abort(service: GenerationService) -> None:
        recorder.calls.clear()
        call = GenerationCall(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), request_id="aborted")

        async def read() -> None:
            async with service.run(call) as generation:
                assert service.abort("", "aborted")
                async for _ in generation.events:
                    pass

        with pytest.raises(RequestAborted):
            await read()
        assert isinstance(recorder.calls[-1], RequestAborted)

    async def _repeat(service: GenerationService) -> None:
        """A request is reported once, however many calls read it."""
        recorder.calls.clear()
        call = GenerationCall(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), request_id="r")
        async with service.run(call) as generation:
            assert [event async for event in generation.events]
        assert recorder.calls == []

    with local_replica(resolve(options, Machine.this())) as local:
        replica = ReplicaClient(local.address, "replica-0", heartbeat_s=0.1)
        replica.start()
        models = serve_single_replica(local.config, Tokenizer(model), replica)
        service = GenerationService(models, recorder)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not models.is_ready:
                    await models.wait_for_change()
            await _complete(service)
            await _repeat(service)
            await _refuse(service)
            await _leave(service)
            await _abort(service)
        finally:
            await models.close()
