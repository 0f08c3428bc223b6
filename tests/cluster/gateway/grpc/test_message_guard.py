"""Malformed requests, and requests that would hold up the event loop, over loopback gRPC."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from loop_stall import shortest_stall
from serving import ServerFactory

from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.proto import inference_pb2
from quire.proto.errors import InvalidRequest, QuireError

# In rounds of 100,000 of a loop. Before such messages were refused early, one turn took from 200 (to parse 300,000
# template options) to 700 (to convert 1.3 million token lists). Left is to copy 4 MB, and to count 16,384 fields.
MAX_STALL = 120.0

METHODS = [
    "/quire.v1.Inference/Generate",
    "/quire.v1.Inference/GenerateStream",
    "/quire.v1.Inference/Abort",
    "/quire.v1.Admin/GetStatus",
    "/quire.v1.Admin/Drain",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
]


def _raw(call: Any) -> Any:
    """The call without the types of messages: bytes are sent as they are."""
    return call


async def call(channel: grpc.aio.Channel, method: str, raw: bytes) -> QuireError:
    """Send raw bytes, and return the error."""
    is_stream = method.endswith(("Stream", "Watch"))
    try:
        if is_stream:
            async for _ in _raw(channel.unary_stream(method))(raw):
                pass
        else:
            await _raw(channel.unary_unary(method))(raw)
    except grpc.aio.AioRpcError as error:
        return from_grpc_error(error, "the server")
    raise AssertionError("the call did not fail")


async def test_malformed_message_is_an_invalid_request_without_a_traceback(
    serve: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        caplog.clear()
        for method in METHODS:
            for raw in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f"):  # no field number, a text without an end
                error = await call(channel, method, raw)
                assert isinstance(error, InvalidRequest), (method, error)
                assert "is not a valid message" in str(error)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# Requests with one small field or with one long list; encoded messages that follow each other are merged.
HOSTILE: dict[str, dict[str, Any]] = {
    "bad_token_ids": {"sampling": {"bad_token_ids": [{}]}},
    "bad_words": {"sampling": {"bad_words": [""]}},
    "logit_bias": {"sampling": {"logit_bias": {1: 1.0}}},
    "stop": {"sampling": {"stop": [""]}},
    "messages": {"chat": {"messages": [{}]}},
    "template_options": {"chat": {"template_options": {"x": None}}},
    "stop_token_ids": {"sampling": {"stop_token_ids": [1] * 4_000_000}},
    "allowed_token_ids": {"sampling": {"allowed_token_ids": {"ids": [1] * 4_000_000}}},
    "long_bad_word": {"sampling": {"bad_token_ids": [{"ids": [1] * 4_000_000}]}},
    "token_ids": {"token_ids": {"ids": [1] * 4_000_000}},
}


def hostile_message(fields: dict[str, Any]) -> bytes:
    """A valid message of nearly 4 MB."""
    raw: bytes = inference_pb2.GenerateRequest(**fields).SerializeToString()
    return raw * ((4 << 20) // len(raw))


async def test_no_valid_message_of_4_mb_stalls_the_event_loop(serve: ServerFactory) -> None:
    stalled: dict[str, float] = {}
    async with serve() as server, grpc.aio.insecure_channel(server.target) as channel:
        for name, fields in HOSTILE.items():
            raw = hostile_message(fields)

            async def refused(raw: bytes = raw, name: str = name) -> None:
                error: Any = await call(channel, "/quire.v1.Inference/GenerateStream", raw)
                assert isinstance(error, InvalidRequest), (name, error)

            stalled[name] = await shortest_stall(refused, MAX_STALL)
    assert max(stalled.values()) <= MAX_STALL, stalled
