"""Helpers of tests that use the fixture `serve`: a gateway on loopback gRPC with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from quire import AsyncClient, SamplingParams
from quire.cluster.text.requests.outputs import CompletionDelta, StreamEvent
from quire.proto.errors import ServerUnreachable

ServerFactory = Callable[..., Any]

PROMPT = "The quick brown fox"
# They take less than a second, unless the test has called `server.brake.slow_down()`.
NUM_ENDLESS_TOKENS = 400
ENDLESS = SamplingParams(max_tokens=NUM_ENDLESS_TOKENS, ignore_eos=True)
DEADLINE_S = 60.0


async def eventually(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Wait until the condition holds, DEADLINE_S at most."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def num_used_blocks(client: AsyncClient) -> int:
    return int((await client.status())[0].kv.num_used_blocks)


async def until_free(client: AsyncClient) -> None:
    """Wait until the only replica uses no KV block."""

    async def is_free() -> bool:
        try:
            return await num_used_blocks(client) == 0
        except ServerUnreachable:  # a test broke the connection, which is made again
            return False

    await eventually(is_free)


async def first_delta(events: AsyncIterator[StreamEvent]) -> CompletionDelta:
    async for event in events:
        if isinstance(event, CompletionDelta):
            return event
    raise AssertionError("the stream ended without a delta")


async def drain(events: AsyncIterator[StreamEvent]) -> None:
    async for _ in events:
        pass
