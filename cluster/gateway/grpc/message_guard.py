"""MessageGuard: interceptor that parses requests; it refuses those that would cost too much, or cannot be parsed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sized
from contextlib import aclosing
from functools import lru_cache
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from ....proto import inference_pb2
from ....proto.errors import InvalidRequest
from ....proto.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_OUTPUTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from ...client.wire.grpc_status import to_grpc_status
from .responses import Context

# Parsing a message of this size takes 5 ms at most, whatever is in it (AMD EPYC, one core).
_MAX_UNCHECKED_BYTES = 256 << 10
# Counting these takes 13 ms. A conversation of 4,096 messages has 12,289.
MAX_FIELDS = 16_384

OnRefused = Callable[[InvalidRequest], None]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class MessageGuard(grpc.aio.ServerInterceptor):
    """Interceptor that parses requests, of calls with one and with many.

    gRPC itself ends a call whose request cannot be parsed with UNKNOWN, and logs a traceback per call. And it parses
    in the event loop whatever has the size of a message: 4 MB of small fields hold up all streams for a second.

    Args:
        on_refused: receives the error of each call whose request cannot be parsed.
    """

    def __init__(self, on_refused: OnRefused) -> None:
        self._on_refused = on_refused
        # method |-> its handler, and the one that parses; no method that the server lacks
        self._guarded: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or handler.request_deserializer is None:
            return handler
        known, guarded = self._guarded.get(method, (None, None))
        if known is not handler or guarded is None:
            guarded = self._guard(handler, method)
            self._guarded[method] = handler, guarded
        return guarded

    def _guard(self, handler: Handler, method: str) -> Handler:
        """Return the handler of raw requests that parses each."""
        kind = descriptor_pool.Default().FindMethodByName(method.lstrip("/").replace("/", ".")).input_type
        if handler.request_streaming:
            behavior, make = (
                (handler.stream_stream, grpc.stream_stream_rpc_method_handler)
                if handler.response_streaming
                else (handler.stream_unary, grpc.stream_unary_rpc_method_handler)
            )
            return make(
                _parsing_each(behavior, kind, self._on_refused),
                response_serializer=handler.response_serializer,
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _parsing(handler.unary_stream, kind, self._on_refused),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _parsing(handler.unary_unary, kind, self._on_refused),
            response_serializer=handler.response_serializer,
        )


def parse(raw: bytes | bytearray, kind: Descriptor) -> Message:
    """Return the message. Raises InvalidRequest if it is malformed or has too many fields."""
    if len(raw) > _MAX_UNCHECKED_BYTES and has_more_fields(raw, kind, MAX_FIELDS):
        raise InvalidRequest(kind.name, f"has more than {MAX_FIELDS} fields")
    try:
        # Its types know bytes alone; a bytearray is parsed without a copy.
        return message_factory.GetMessageClass(kind).FromString(cast("bytes", raw))
    except DecodeError:
        raise InvalidRequest(kind.name, f"is not a valid message of {len(raw)} bytes") from None


def _parsing(handle: Any, kind: Descriptor, on_refused: OnRefused) -> Any:
    """Return the handler of raw requests that parses each for `handle`, a coroutine function."""

    async def parsed(raw: bytes, context: Context) -> Message:
        try:
            return parse(raw, kind)
        except InvalidRequest as error:
            on_refused(error)
            await context.abort_with_status(to_grpc_status(error))
            raise  # never reached: abort_with_status raises

    async def call(raw: bytes, context: Context) -> Any:
        message = await parsed(raw, context)
        try:
            return await handle(message, context)
        except NotImplementedError:  # of the generated base class; gRPC would log a traceback per call
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"this server does not have {kind.name}'s call"
            )

    return call


def _parsing_each(handle: Any, kind: Descriptor, on_refused: OnRefused) -> Any:
    """Return the handler of streams of raw requests that parses each for `handle`, a coroutine function."""

    async def parsed(raws: AsyncIterator[bytes], context: Context) -> AsyncGenerator[Message, None]:
        async for raw in raws:
            try:
                yield parse(raw, kind)
            except InvalidRequest as error:
                on_refused(error)
                await context.abort_with_status(to_grpc_status(error))

    async def call(raws: AsyncIterator[bytes], context: Context) -> Any:
        async with aclosing(parsed(raws, context)) as messages:
            return await handle(messages, context)

    return call


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NUM_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def has_more_fields(raw: bytes | bytearray, kind: Descriptor, limit: int) -> bool:
    """Return whether an encoded message has more than `limit` fields, those of nested messages included.

    Takes about 1 us per field, up to `limit`. A malformed message is counted up to its error.

    Args:
        kind: the type of the message.
    """
    num_fields = 0
    unread = [(0, len(raw), _message_types(kind))]  # ranges of nested messages
    while unread:
        position, end, message_types = unread.pop()
        while position < end:
            num_fields += 1
            if num_fields > limit:
                return True
            tag = raw[position]  # numbers of one byte are read in line: twice as fast
            position += 1
            if tag >= 0x80:
                tag, position = _varint(raw, position - 1, end)
            wire_type = tag & 7
            if wire_type == _BYTES:
                num_bytes, position = _varint(raw, position, end)
                nested = message_types.get(tag >> 3)
                if nested is not None and num_bytes:
                    unread.append((position, min(end, position + num_bytes), _message_types(nested)))
                position += num_bytes
            elif wire_type == _VARINT:
                _, position = _varint(raw, position, end)
            else:
                position += _NUM_FIXED_BYTES.get(wire_type, len(raw))  # of an unknown type: malformed
    return False


def _varint(raw: bytes | bytearray, position: int, end: int) -> tuple[int, int]:
    """Return the number at a position and the position after it; `end` if it has no end."""
    if position < end and raw[position] < 0x80:
        return raw[position], position + 1
    number = shift = 0
    while position < end:
        byte = raw[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            break
    return 0, end


@lru_cache(None)
def _message_types(kind: Descriptor) -> dict[int, Descriptor]:
    """Return field number |-> type of the nested message."""
    return {field.number: nested for field in kind.fields if (nested := field.message_type) is not None}


# Of a prompt that is truncated: converting these takes 20 ms.
MAX_TRUNCATED_TOKENS = 1 << 20


def check_counts(message: inference_pb2.GenerateRequest, max_prompt_tokens: int) -> None:
    """Raises InvalidRequest, which names the field, if a list is longer than any valid request's.

    Args:
        max_prompt_tokens: the longest prompt that the model serves.
    """
    sampling = message.sampling
    for field, given, limit in (
        ("sampling.stop", sampling.stop, MAX_STOP_STRINGS),
        ("sampling.stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("sampling.logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES),
        ("sampling.bad_words", sampling.bad_words, MAX_BAD_WORDS),
        ("sampling.bad_token_ids", sampling.bad_token_ids, 2 * MAX_BAD_WORDS),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids.ids, MAX_ALLOWED_TOKEN_IDS),
        ("received.outputs", message.received.outputs, MAX_OUTPUTS),
    ):
        _check(field, given, limit, "entries")
    for index, word in enumerate(sampling.bad_token_ids):
        _check(f"sampling.bad_token_ids[{index}]", word.ids, MAX_BAD_WORD_TOKENS, "tokens")
    num_tokens = len(message.token_ids.ids)
    if sampling.HasField("truncate_prompt_tokens"):
        max_prompt_tokens = max(max_prompt_tokens, MAX_TRUNCATED_TOKENS)
    if num_tokens > max_prompt_tokens:
        raise InvalidRequest("prompt", f"has {num_tokens} tokens, must have at most {max_prompt_tokens}")


def _check(field: str, given: Sized, limit: int, unit: str) -> None:
    if len(given) > limit:
        raise InvalidRequest(field, f"has {len(given)} {unit}, must have at most {limit}")
