"""Requests in pieces are put together within bounds, and refused by name beyond them."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from deadlines import PROGRAM_TIMEOUT_S
from loop_stall import shortest_stall
from serving import ServerFactory

from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.cluster.gateway.grpc import large_requests
from quire.cluster.gateway.grpc.large_requests import COPIES, MAX_REQUEST_BYTES, LargeRequests
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.errors import DeadlineExpired, InvalidRequest, QuireError, QuotaExceeded

Piece = inference_pb2.RequestPiece
RAW: bytes = inference_pb2.GenerateRequest(text="a prompt", request_id="r").SerializeToString()


async def pieces_of(*pieces: Piece) -> AsyncIterator[Piece]:
    for piece in pieces:
        yield piece


async def unfinished(num_bytes: int, has_begun: asyncio.Event) -> AsyncIterator[Piece]:
    """Announce bytes that do not come."""
    yield Piece(data=b"x", num_bytes=num_bytes)
    has_begun.set()
    await asyncio.Event().wait()


async def receive(
    requests: LargeRequests, pieces: AsyncIterator[Piece], tenant: str
) -> inference_pb2.GenerateRequest:
    async with requests.receive(pieces, tenant) as request:
        return request


async def test_pieces_are_put_together() -> None:
    first = Piece(data=RAW[:3], num_bytes=len(RAW))
    requests = LargeRequests()
    async with requests.receive(pieces_of(first, Piece(data=RAW[3:])), "t") as request:
        assert (request.text, request.request_id) == ("a prompt", "r")
        assert requests.num_reserved_bytes == COPIES * len(RAW)
    assert not requests.num_reserved_bytes


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ((), "has no pieces"),
        ((Piece(data=RAW),), "num_bytes: is 0"),
        ((Piece(data=RAW, num_bytes=-1),), "num_bytes: is -1"),
        ((Piece(data=RAW, num_bytes=MAX_REQUEST_BYTES + 1),), "must be from 1 to 33554432"),
        ((Piece(data=RAW, num_bytes=5),), "5 were announced"),
        ((Piece(data=RAW, num_bytes=len(RAW) + 2), Piece(data=b"x")), "were announced"),
        ((Piece(data=RAW, num_bytes=len(RAW) + 2), Piece()), "data: is empty"),
        ((Piece(data=b"\xff", num_bytes=1),), "is not a valid message"),
    ],
)
async def test_pieces_that_are_no_request_are_refused(pieces: tuple[Piece, ...], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await receive(LargeRequests(), pieces_of(*pieces), "t")


async def test_a_tenant_sends_a_bounded_amount_at_once() -> None:
    requests = LargeRequests()
    begun = [asyncio.Event() for _ in range(2)]
    running = [
        asyncio.create_task(receive(requests, unfinished(MAX_REQUEST_BYTES, each), "a")) for each in begun
    ]
    for each in begun:
        await each.wait()
    with pytest.raises(QuotaExceeded, match="bytes of requests in pieces"):
        await receive(requests, pieces_of(Piece(data=RAW, num_bytes=len(RAW))), "a")
    assert await receive(requests, pieces_of(Piece(data=RAW, num_bytes=len(RAW))), "b")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert await receive(requests, pieces_of(Piece(data=RAW, num_bytes=len(RAW))), "a")


async def test_pieces_that_do_not_come_end_the_call(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_requests, "RECEIVE_TIMEOUT_S", 0.2)
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        error = await failure(stub.GenerateInPieces(unfinished(100, asyncio.Event())))
        assert isinstance(error, DeadlineExpired)
        assert "within 0.2 s" in str(error)
        error = await failure(stub.GenerateInPieces(pieces_of(Piece(data=RAW))))
        assert isinstance(error, InvalidRequest)


async def failure(call: Any) -> QuireError:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_grpc_error(error, "the server")
    raise AssertionError("the call did not fail")


async def test_a_malformed_piece_is_an_invalid_request(serve: ServerFactory) -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        whole: Any = channel.stream_unary("/quire.v1.Inference/GenerateInPieces")
        error = await failure(whole(iter([b"\xff"])))
        assert "is not a valid message" in str(error)
        stream: Any = channel.stream_stream("/quire.v1.Inference/GenerateStreamInPieces")
        with pytest.raises(grpc.aio.AioRpcError, match="is not a valid message"):
            async for _ in stream(iter([b"\xff"])):
                pass


# In rounds of 100,000 of a loop. Left is to copy 31 MiB three times, and to hash them.
MAX_STALL = 120.0


async def test_a_large_image_does_not_stall_the_event_loop(serve: ServerFactory) -> None:
    """The model reads no images, and says so once the request is there."""
    image = inference_pb2.Image(data=random.Random(0).randbytes(31 << 20))
    part = inference_pb2.ContentPart(image=image)
    message = inference_pb2.ChatMessage(role="user", content_parts=[part])
    chat = inference_pb2.Chat(messages=[message])
    raw = inference_pb2.GenerateRequest(chat=chat, request_id="r").SerializeToString()
    parts = [raw[start : start + (1 << 20)] for start in range(0, len(raw), 1 << 20)]
    pieces = [Piece(data=each, num_bytes=0 if index else len(raw)) for index, each in enumerate(parts)]
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def refused() -> None:
            error = await failure(stub.GenerateInPieces(pieces_of(*pieces)))
            assert "is an image" in str(error)

        assert await shortest_stall(refused, MAX_STALL) <= MAX_STALL


_MEASURE = """
import asyncio, sys
from quire.cluster.gateway.grpc.large_requests import LargeRequests
from quire.proto import inference_pb2

num_bytes, piece_len, count = map(int, sys.argv[1:])
part = inference_pb2.ContentPart(image=inference_pb2.Image(data=bytes(num_bytes)))
message = inference_pb2.ChatMessage(role="user", content_parts=[part])
raw = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[message])).SerializeToString()
del message, part

def memory(field):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))

async def pieces():
    for start in range(0, len(raw), piece_len):
        data = raw[start : start + piece_len]
        yield inference_pb2.RequestPiece(data=data, num_bytes=0 if start else len(raw))

async def main():
    requests, are_there, files = LargeRequests(), asyncio.Barrier(count), []

    async def call(tenant):
        async with requests.receive(pieces(), tenant) as request:
            files.append(request.chat.messages[0].content_parts[0].image.data)
            del request
            await are_there.wait()
            return requests.num_reserved_bytes

    before = memory("VmRSS")
    reserved = await asyncio.gather(*(call(f"tenant-{index}") for index in range(count)))
    print(memory("VmHWM") - before, max(reserved))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("num_bytes", "piece_len", "count"), [(16 << 20, 1 << 20, 4), (2 << 20, 16, 2)], ids=["large", "small"]
)
def test_requests_take_no_more_memory_than_is_reserved(num_bytes: int, piece_len: int, count: int) -> None:
    command = [sys.executable, "-c", _MEASURE, *map(str, (num_bytes, piece_len, count))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    taken, reserved = map(int, done.stdout.split())
    assert reserved >= count * COPIES * num_bytes
    assert taken <= reserved + (4 << 20)
