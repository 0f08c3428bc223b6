"""Calls of a server under load, over gRPC and HTTP: open loop at a rate, and what became of each call."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import httpx

from quire import AsyncClient, SamplingParams
from quire.proto.errors import QuireError

PROMPT = "It was"
# A call that has not ended so long after its last chance has failed.
HANG_S = 120.0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the load.

    Attributes:
        seconds: until its end.
        num_tokens: of a complete output; 0 otherwise.
        error: reason of its failure as quire names it; empty without one.
        retry_s: delay that the error names; None if it names none.
        timeout_s: its deadline; None without one.
    """

    began_at: float
    seconds: float
    num_tokens: int = 0
    error: str = ""
    retry_s: float | None = None
    timeout_s: float | None = None

    @property
    def is_late(self) -> bool:
        """The call took until its deadline and was not complete."""
        return self.timeout_s is not None and not self.is_complete and self.seconds >= self.timeout_s

    @property
    def is_complete(self) -> bool:
        return self.num_tokens > 0


# Sends one call with a deadline in seconds, or without; returns (tokens, reason of the error, delay before a retry).
Outcome = tuple[int, str, float | None]
Door = Callable[[float | None], Awaitable[Outcome]]


def grpc_door(client: AsyncClient, num_tokens: int) -> Door:
    """Return a sender over gRPC."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)

    async def send(timeout_s: float | None) -> Outcome:
        try:
            output = await client.generate(PROMPT, params, timeout_s=timeout_s, resumable=False)
        except QuireError as error:
            return 0, error.reason, error.retry_delay_s if error.is_retriable else None
        return len(output.outputs[0].token_ids), "", None

    return send


def http_door(client: httpx.AsyncClient, model: str, num_tokens: int) -> Door:
    """Return a sender over HTTP."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0
    }  # fmt: skip

    async def send(timeout_s: float | None) -> Outcome:
        headers = {} if timeout_s is None else {"x-request-timeout": f"{timeout_s:g}"}
        response = await client.post("/v1/completions", json=body, headers=headers)
        if response.is_success:
            return int(response.json()["usage"]["completion_tokens"]), "", None
        delay = response.headers.get("retry-after")
        reason = str(response.json()["error"]["code"]).upper()
        return 0, reason, None if delay is None else float(delay)

    return send


async def send(door: Door, timeout_s: float | None) -> Call:
    """Send one call. Raises TimeoutError if it does not end."""
    began_at = time.monotonic()
    async with asyncio.timeout(HANG_S):
        num_tokens, error, retry_s = await door(timeout_s)
    return Call(began_at, time.monotonic() - began_at, num_tokens, error, retry_s, timeout_s)


async def closed_loop(door: Door, num_at_once: int, seconds: float) -> list[Call]:
    """Keep so many calls running for so long."""
    end, calls = time.monotonic() + seconds, list[Call]()

    async def repeat() -> None:
        while time.monotonic() < end:
            calls.append(await send(door, None))

    await asyncio.gather(*(repeat() for _ in range(num_at_once)))
    return calls


async def open_loop(
    door: Door, rate: float, seconds: float, timeout_s: float | None, rng: random.Random
) -> list[Call]:
    """Send calls at a rate, independent of each other, and wait for all of them."""
    calls: list[asyncio.Task[Call]] = []
    now = start = time.monotonic()
    while (now := now + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, now - time.monotonic()))
        calls.append(asyncio.create_task(send(door, timeout_s)))
    return await asyncio.gather(*calls)


def goodput(calls: Iterable[Call], start: float, end: float) -> float:
    """Return the tokens per second of complete calls between two times.

    The tokens of a call count evenly over its time: complete calls come in groups, of which the borders would cut off
    a random part.
    """
    num_tokens = 0.0
    for call in calls:
        if call.is_complete:
            inside_s = min(call.began_at + call.seconds, end) - max(call.began_at, start)
            num_tokens += call.num_tokens * max(0.0, inside_s) / call.seconds
    return num_tokens / (end - start)
