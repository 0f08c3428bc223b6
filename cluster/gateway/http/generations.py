"""Running several prompts of one call together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from ....proto.errors import InvalidRequest
from ...text.requests.outputs import RequestOutput, StreamEvent, collect_output
from ..generation.generation import Generation, GenerationCall, GenerationService

# Events of all prompts that wait for the client; more wait in their own queues, merged.
_MAX_WAITING = 16
# Log-probabilities of prompts in one response. Each is 70 bytes of JSON.
MAX_PROMPT_LOGPROBS = 1 << 20


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
