"""Overload of a server over gRPC and HTTP: every call ends, and refusals name a delay."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from local_server import local_server

from benchmarks.overload_calls import Call, Door, closed_loop, goodput, grpc_door, http_door, open_loop, send

NUM_TOKENS = 24
MAX_QUEUE_LEN = 4
# As many calls per second as no machine serves with one row.
RATE = 400.0


@asynccontextmanager
async def small_server(model: Path) -> AsyncIterator[dict[str, Door]]:
    """Run a server with one row; yield protocol |-> sender of calls."""
    async with (
        local_server(model, http=True, max_num_seqs=1, max_queue_len=MAX_QUEUE_LEN) as server,
        grpc.aio.insecure_channel(server.target) as channel,
        http_door(server.url, "tiny", NUM_TOKENS) as over_http,
    ):
        yield {"grpc": grpc_door(channel, NUM_TOKENS), "http": over_http}


async def test_calls_are_served_or_refused_with_a_delay(make_model: Callable[..., Path]) -> None:
    async def overload(door: Door, timeout_s: float | None) -> None:
        await closed_loop(door, 2, 0.1)
        calls = await open_loop(door, RATE, 0.3, timeout_s, random.Random(1))
        refused = [call for call in calls if call.error == "OVERLOADED"]
        assert refused
        assert {call.error for call in calls} <= {"", "OVERLOADED"}
        assert all(call.num_tokens == NUM_TOKENS for call in calls if call.is_complete)
        assert all(call.retry_s is not None and call.retry_s > 0 for call in refused)
        assert (await send(door, None)).is_complete

    async with small_server(make_model("llama")) as doors:
        await overload(doors["grpc"], None)
        await overload(doors["http"], 60.0)


def test_goodput_counts_complete_calls_evenly_over_their_time() -> None:
    calls = [Call(0.0, 2.0, 10), Call(0.0, 5.0, 20), Call(1.0, 3.0, 0, "OVERLOADED"), Call(3.0, 0.5, 30)]
    assert goodput(calls, 1.0, 4.0) == pytest.approx((10 / 2 + 20 * 3 / 5 + 30) / 3)
