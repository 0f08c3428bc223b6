"""Requests in pieces are put together within bounds, and refused by name beyond them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from loop_stall import shortest_stall
from serving import ServerFactory, run

from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.cluster.gateway.grpc import large_requests
from quire.cluster.gateway.grpc.large_requests import MAX_REQUEST_BYTES, LargeRequests
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


def test_pieces_are_put_together() -> None:
    async def scenario() -> None:
        first = Piece(data=RAW[:3], num_bytes=len(RAW))
        request = await LargeRequests().receive(pieces_of(first, Piece(data=RAW[3:])), "t")
        assert (request.text, request.request_id) == ("a prompt", "r")

    run(scenario())


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
def test_pieces_that_are_no_request_are_refused(pieces: tuple[Piece, ...], problem: str) -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidRequest, match=problem):
            await LargeRequests().receive(pieces_of(*pieces), "t")

    run(scenario())


def test_a_tenant_sends_a_bounded_amount_at_once() -> None:
    async def scenario() -> None:
        requests = LargeRequests()
        begun = [asyncio.Event() for _ in range(2)]
        running = [
            asyncio.create_task(requests.receive(unfinished(MAX_REQUEST_BYTES, each), "a")) for each in begun
        ]
        for each in begun:
            await each.wait()
        with pytest.raises(QuotaExceeded, match="bytes of requests in pieces"):
            await requests.receive(pieces_of(Piece(data=RAW, num_bytes=len(RAW))), "a")
        assert await requests.receive(pieces_of(Piece(data=RAW, num_bytes=len(RAW))), "b")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert await requests.receive(pieces_of(Piece(data=RAW, num_bytes=len(RAW))), "a")

    run(scenario())


def test_pieces_that_do_not_come_end_the_call(serve: ServerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_requests, "RECEIVE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            error = await failure(stub.GenerateInPieces(unfinished(100, asyncio.Event())))
            assert isinstance(error, DeadlineExpired)
            assert "within 0.2 s" in str(error)
            error = await failure(stub.GenerateInPieces(pieces_of(Piece(data=RAW))))
            assert isinstance(error, InvalidRequest)

    run(scenario())


async def failure(call: Any) -> QuireError:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_grpc_error(error, "the server")
    raise AssertionError("the call did not fail")


def test_a_malformed_piece_is_an_invalid_request(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
            whole: Any = channel.stream_unary("/quire.v1.Inference/GenerateInPieces")
            error = await failure(whole(iter([b"\xff"])))
            assert "is not a valid message" in str(error)
            stream: Any = channel.stream_stream("/quire.v1.Inference/GenerateStreamInPieces")
            with pytest.raises(grpc.aio.AioRpcError, match="is not a valid message"):
                async for _ in stream(iter([b"\xff"])):
                    pass

    run(scenario())


# In rounds of 100,000 of a loop. Left is to copy 31 MiB three times, and to hash them.
MAX_STALL = 120.0


def test_a_large_image_does_not_stall_the_event_loop(serve: ServerFactory) -> None:
    """The model reads no images, and says so once the request is there."""
    image = inference_pb2.Image(data=random.Random(0).randbytes(31 << 20))
    part = inference_pb2.ContentPart(image=image)
    message = inference_pb2.ChatMessage(role="user", content_parts=[part])
    chat = inference_pb2.Chat(messages=[message])
    raw = inference_pb2.GenerateRequest(chat=chat, request_id="r").SerializeToString()
    parts = [raw[start : start + (1 << 20)] for start in range(0, len(raw), 1 << 20)]
    pieces = [Piece(data=each, num_bytes=0 if index else len(raw)) for index, each in enumerate(parts)]

    async def scenario() -> None:
        async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def refused() -> None:
                error = await failure(stub.GenerateInPieces(pieces_of(*pieces)))
                assert "is an image" in str(error)

            assert await shortest_stall(refused, MAX_STALL) <= MAX_STALL

    run(scenario())
