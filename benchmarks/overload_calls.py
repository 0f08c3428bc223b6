"""Calls of a server under load, over gRPC and HTTP: open loop at a rate, and what became of each call."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.proto import inference_pb2

PROMPT = "It was"
GENERATE = "/quire.v1.Inference/Generate"
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


def grpc_door(channel: grpc.aio.Channel, num_tokens: int, authorization: str = "") -> Door:
    """Return a sender over gRPC, of bytes that are made once: the caller shares the cores with the server."""
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0),
    ).SerializeToString()
    generate: Any = channel.unary_unary(GENERATE)
    metadata = (("authorization", authorization),) if authorization else None

    async def send(timeout_s: float | None) -> Outcome:
        try:
            response = await generate(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            failure = from_grpc_error(error, "the server")
            return 0, failure.reason, failure.retry_delay_s
        output = inference_pb2.GenerateResponse.FromString(response)
        return len(output.outputs[0].token_ids), "", None

    return send


@asynccontextmanager
async def http_door(url: str, model: str, num_tokens: int, authorization: str = "") -> AsyncIterator[Door]:
    """Yield a sender over HTTP, of bytes that are made once, on connections that are kept.

    A refused call costs this caller a third of the CPU time that it costs httpx.

    Args:
        url: ``http://HOST:PORT``.
    """
    address = url.removeprefix("http://")
    host, _, port = address.rpartition(":")
    content = {
        "model": model, "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0
    }  # fmt: skip
    body = json.dumps(content).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n"
    head += f"authorization: {authorization}\r\n" if authorization else ""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection that the server has not closed: it closes those that are idle for some seconds."""
        while idle:
            reader, writer = idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(host, int(port))

    async def send(timeout_s: float | None) -> Outcome:
        limit = "" if timeout_s is None else f"x-request-timeout: {timeout_s:g}\r\n"
        reader, writer = await connect()
        writer.write(f"{head}{limit}\r\n".encode() + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        idle.append((reader, writer))
        if status.split()[1] == "200":
            return int(answer["usage"]["completion_tokens"]), "", None
        delay = headers.get("retry-after")
        return 0, str(answer["error"]["code"]).upper(), None if delay is None else float(delay)

    try:
        yield send
    finally:
        for _, writer in idle:
            writer.close()


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
