"""Random requests, random bytes and broken connections: nothing crashes, leaks, or is logged with a traceback."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool, message_factory
from random_messages import random_message
from serving import DEADLINE_S, ENDLESS, PROMPT, ServerFactory, eventually, first_delta

from quire.cluster.client.client import AsyncClient
from quire.cluster.gateway.grpc import server as gateway_server
from quire.proto import admin_pb2, inference_pb2
from quire.proto.errors import ServerUnreachable
from quire.proto.sampling import SamplingParams

# Never the answer to a caller's mistake.
FAULTS = {"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE"}
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    descriptor_pool.Default().FindServiceByName("grpc.health.v1.Health"),
)
# An operator who asks for these two gets what they say: a server that answers nobody until it is told to.
STOPPING = {"Sleep", "Pause"}
METHODS = [method for service in SERVICES for method in service.methods if method.name not in STOPPING]
CALL_TIMEOUT_S = 3.0
SLOW_TIMEOUT_S = 900.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty settings
SLOW = (pytest.mark.slow, pytest.mark.timeout(SLOW_TIMEOUT_S))


async def call(channel: grpc.aio.Channel, method: Any, raw: bytes) -> str:
    """Send raw bytes, and return the name of the status; of an endless stream after its first responses."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    anything: Any = channel
    try:
        if not method.server_streaming:
            await anything.unary_unary(path)(raw, timeout=CALL_TIMEOUT_S)
            return "OK"
        stream = anything.unary_stream(path)(raw, timeout=CALL_TIMEOUT_S)
        for _ in range(3):
            if await stream.read() is grpc.aio.EOF:
                break
        stream.cancel()
        return "OK"
    except grpc.aio.AioRpcError as error:
        if error.code().name in FAULTS:
            raise AssertionError(f"{path} of {raw!r}: {error.code().name}: {error.details()}") from error
        return str(error.code().name)


async def until_idle(server: Any) -> None:
    """Wait until nothing of any request is left: no sequence, block, row or queued request."""

    async def is_idle() -> bool:
        state = server.scheduler._state
        return not (
            server.replica.num_running
            or state.alive
            or state.running
            or len(state.waiting)
            or state.blocks.num_held_blocks
        )

    await eventually(is_idle)
    server.scheduler._state.check_integrity()


def no_faults_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("num_messages", [150, pytest.param(10_000, marks=SLOW)])
async def test_random_messages_are_served_or_refused(
    serve: ServerFactory, caplog: pytest.LogCaptureFixture, num_messages: int
) -> None:
    """Messages of every method with every field at random, and valid messages with random bytes changed."""
    answered: Counter[str] = Counter()
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        caplog.clear()
        limit = asyncio.Semaphore(8)

        async def send(seed: int) -> None:
            rng = random.Random(seed)
            method = rng.choice(METHODS) if seed % 3 else METHODS[seed // 3 % 2]
            message = random_message(message_factory.GetMessageClass(method.input_type)(), rng)
            raw = bytearray(message.SerializeToString())
            for _ in range(rng.choice((0, 0, 1, 3))):
                if raw:
                    raw[rng.randrange(len(raw))] = rng.randrange(256)
            async with limit:
                answered[await call(channel, method, bytes(raw))] += 1

        await asyncio.gather(*map(send, range(num_messages)))
        await until_idle(server)
        async with AsyncClient(server.target) as client:  # still as good as new
            assert (await client.generate(PROMPT, SamplingParams(max_tokens=2))).outputs[0].token_ids
    assert sum(answered.values()) == num_messages
    assert answered["INVALID_ARGUMENT"]
    no_faults_logged(caplog)


def _hostile_bytes(rng: random.Random) -> bytes:
    """Bytes that are no call: noise, half of HTTP/1 or HTTP/2, or frames of HTTP/2 with noise inside."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    noise = rng.randbytes(rng.choice((0, 1, 24, 3000)))
    frame = rng.randrange(200).to_bytes(3, "big") + rng.randbytes(6) + noise
    return rng.choice(
        (
            noise,
            preface[: rng.randrange(len(preface))],
            preface + noise,
            preface + bytes(9) + frame,  # after empty SETTINGS
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{" + noise,
            b"GET /health HTTP/1.1\r\n" + noise,
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
            b"\x16\x03\x01\x02\x00" + noise,  # the beginning of TLS
        )
    )


@pytest.mark.parametrize("num_connections", [200, pytest.param(10_000, marks=SLOW)])
async def test_broken_connections_leave_nothing_behind(
    serve: ServerFactory, caplog: pytest.LogCaptureFixture, num_connections: int
) -> None:
    """Connections to both ports with noise, then closed, half-closed or reset; and streams dropped as they run."""

    async def connect(port: int, seed: int) -> None:
        rng = random.Random(seed)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_hostile_bytes(rng))
            if seed % 3 == 1 and writer.can_write_eof():
                writer.write_eof()
            if seed % 2:
                await asyncio.wait_for(reader.read(1), 0.05)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            (writer.transport.abort if seed % 5 else writer.close)()

    async def drop_stream(target: str) -> None:
        client = AsyncClient(target)
        await first_delta(client.generate_stream(PROMPT, ENDLESS))
        await client.close()

    async with serve(http=True) as server:
        ports = [int(address.rpartition(":")[2]) for address in (server.target, server.url)]
        await connect(ports[0], 0)
        await drop_stream(server.target)
        await until_idle(server)
        caplog.clear()
        before = _descriptors(), len(asyncio.all_tasks())
        limit = asyncio.Semaphore(32)

        async def attack(seed: int) -> None:
            async with limit:
                if seed % 20 == 0:
                    await drop_stream(server.target)
                else:
                    await connect(ports[seed % 2], seed)

        await asyncio.gather(*map(attack, range(num_connections)))
        await until_idle(server)

        async def is_as_before() -> bool:
            return _descriptors() <= before[0] + 4 and len(asyncio.all_tasks()) <= before[1] + 1

        await eventually(is_as_before)
        async with AsyncClient(server.target) as client:
            assert (await client.generate(PROMPT, SamplingParams(max_tokens=2))).outputs[0].token_ids
    no_faults_logged(caplog)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_message_above_the_limit_is_refused(serve: ServerFactory) -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        raw = inference_pb2.GenerateRequest(text="x" * (5 << 20)).SerializeToString()
        assert await call(channel, METHODS[0], raw) == "RESOURCE_EXHAUSTED"


async def test_connections_beyond_the_limit_are_closed(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise idle connections take every file descriptor, also those that HTTP and the gateway itself need."""
    monkeypatch.setattr(gateway_server, "max_connections", lambda at_most: 3)

    async def is_open(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
        """A server of HTTP/2 sends its settings at once."""
        try:
            return bool(await asyncio.wait_for(connection[0].read(1), DEADLINE_S))
        except ConnectionError:
            return False

    async with serve() as server:
        caplog.clear()
        host, _, port = server.target.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        for _, writer in idle:
            writer.write(_PREFACE)
        are_open = [await is_open(connection) for connection in idle]
        assert sum(are_open) <= 3, are_open
        for _, writer in idle:
            writer.close()

        async def is_served() -> bool:
            async with AsyncClient(server.target) as client:
                try:
                    return bool((await client.generate(PROMPT, SamplingParams(max_tokens=2))).outputs)
                except ServerUnreachable:
                    return False

        await eventually(is_served)
    no_faults_logged(caplog)
