"""Calls of the endpoints: tenant, trace and deadline of each, and how it runs until it ends or its client leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.types import Receive

from ....proto.errors import InvalidRequest, QuireError
from ...text.requests.outputs import RequestOutput, StreamEvent, collect_output
from ...text.requests.request import TextPair
from ..admin.services import GatewayServices
from ..generation.generation import Generation, GenerationCall, GenerationService
from .errors import ClientLeft

_TRACE_HEADERS = ("traceparent", "tracestate")
# Seconds that the caller waits for the whole output. gRPC has deadlines of its own.
TIMEOUT_HEADER = "x-request-timeout"
# Events of all prompts that wait for the client; more wait in their own queues, merged.
_MAX_WAITING = 16
# Log-probabilities of prompts in one response. Each is 70 bytes of JSON.
MAX_PROMPT_LOGPROBS = 1 << 20


def with_context(call: GenerationCall, request: Request, services: GatewayServices) -> GenerationCall:
    """Return the call with its tenant, its trace and its deadline.

    Raises:
        InvalidRequest: the header X-Request-Timeout is not a positive number.
    """
    headers = request.headers
    return replace(
        call,
        tenant=services.authenticator.tenant(request.state.caller, ""),
        timeout_s=_timeout_s(headers.get(TIMEOUT_HEADER)),
        trace_headers={name: headers[name] for name in _TRACE_HEADERS if name in headers},
    )


async def prompt_token_ids(services: GatewayServices, call: GenerationCall) -> list[int]:
    """Return the tokens of a call's prompt, without running it. Raises InvalidRequest for an invalid prompt."""
    model = services.models.find(call.model)
    assert not isinstance(call.prompt, TextPair), "only the server makes pairs"
    prompt = await services.generation.with_fetched_images(model, call)
    check = partial(model.checker.token_ids, prompt, add_special_tokens=call.add_special_tokens)
    return await services.generation.prompt_concurrency.run(call.tenant, check)


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("X-Request-Timeout", f"is {text!r}, must be a positive number of seconds")
    return seconds


@contextmanager
def preparing(services: GatewayServices, names: Mapping[str, str]) -> Iterator[None]:
    """Count errors from the block as refused calls, and rename their fields as `renamed_fields` does.

    For what an endpoint does before `GenerationService.run`, which counts its own refusals.
    """
    try:
        with renamed_fields(names):
            yield
    except QuireError as error:
        services.on_refused(error)
        raise


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors from the block the field names of the endpoint: field of quire.v1 |-> field of the endpoint."""
    try:
        yield
    except InvalidRequest as error:
        field, dot, rest = error.field.partition("[")
        if field not in names:
            raise
        raise InvalidRequest(names[field] + dot + rest, error.problem) from error


@asynccontextmanager
async def unless_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs in the block when the client leaves. The request's body must have been read.

    Raises:
        ClientLeft: the client has left.
    """
    work = asyncio.current_task()
    assert work is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and work.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()


@asynccontextmanager
async def run_all(
    service: GenerationService, calls: Iterable[GenerationCall]
) -> AsyncIterator[list[Generation]]:
    """Run the calls. On every exit from the block their sequences have ended.

    Raises:
        InvalidRequest: the response would have too many log-probabilities of prompts.
    """
    async with AsyncExitStack() as stack:
        generations = []
        num_values = 0
        for call in calls:
            generations.append(await stack.enter_async_context(service.run(call)))
            num_values += _num_prompt_logprobs(generations[-1])
            if num_values > MAX_PROMPT_LOGPROBS:
                raise InvalidRequest(
                    "sampling.prompt_logprobs",
                    f"makes more than {MAX_PROMPT_LOGPROBS} log-probabilities; send fewer or shorter prompts",
                )
            await asyncio.sleep(0)  # checking one takes 0.2 ms, and other streams must not wait for all
        yield generations


def _num_prompt_logprobs(generation: Generation) -> int:
    """Return the number of log-probabilities of the prompt; each choice repeats them."""
    sampling = generation.request.sampling
    if sampling.prompt_logprobs is None:
        return 0
    return sampling.n * (1 + sampling.prompt_logprobs) * len(generation.request.prompt_token_ids)


async def numbered_events(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """Yield the events of all generations as they come, each with the index of its generation."""
    if len(generations) == 1:
        async for event in generations[0].events:
            yield 0, event
        return
    arrived: asyncio.Queue[tuple[int, StreamEvent] | Exception | None] = asyncio.Queue(_MAX_WAITING)

    async def forward(index: int) -> None:
        try:
            async for event in generations[index].events:
                await arrived.put((index, event))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(forward(index)) for index in range(len(generations))]
    try:
        num_open = len(generations)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def run_to_end(
    services: GatewayServices, calls: Sequence[GenerationCall], names: Mapping[str, str], request: Request
) -> tuple[list[Generation], list[RequestOutput]]:
    """Run the calls of a request until they end; return each one's generation and output.

    Args:
        names: see `renamed_fields`.

    Raises:
        ClientLeft: the client has left.
        QuireError: a call failed, or `run_all` refuses it.
    """
    async with unless_client_leaves(request.receive):
        with renamed_fields(names):
            async with run_all(services.generation, calls) as generations:
                return generations, await collect_all(generations)


async def collect_all(generations: Sequence[Generation]) -> list[RequestOutput]:
    """Return the outputs of all generations once they have ended."""
    events: list[list[StreamEvent]] = [[] for _ in generations]
    async for index, event in numbered_events(generations):
        events[index].append(event)
    return [_output(generation, each) for generation, each in zip(generations, events, strict=True)]


def _output(generation: Generation, events: list[StreamEvent]) -> RequestOutput:
    request = generation.request
    return collect_output(
        events,
        prompt=None,
        prompt_token_ids=request.prompt_token_ids.tolist(),
        with_prompt_logprobs=request.sampling.prompt_logprobs is not None,
    )
