"""Responses and statuses of gRPC calls, whose clients may never read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc.aio

from ....proto.errors import DeadlineExpired, ProtocolError, QuireError
from ...client.wire.grpc_status import to_grpc_status

# As over HTTP. gRPC sends a message as HTTP/2 flow control lets the client receive it, so a client that reads slowly
# takes one in less time, and one that reads nothing would keep its call for ever, with all that the call holds.
WRITE_TIMEOUT_S = 60.0

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[[Any, RequestT, Context], Awaitable[ResponseT]]


class UnreadResponse(DeadlineExpired):
    """The client did not read a response in time.

    Args:
        write: sends the response once the client reads; a status cannot overtake it.
    """

    def __init__(self, write: asyncio.Task[bool]) -> None:
        super().__init__(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s")
        self.write = write


async def write_in_time(context: Context, response: object) -> None:
    """Write a response of a stream. If its connection has ended, the call ends as if its client had canceled it.

    Raises:
        UnreadResponse: the client has read nothing for WRITE_TIMEOUT_S.
    """
    write = asyncio.get_running_loop().create_task(_write(context, response))  # costs 6 us
    await asyncio.wait((write,), timeout=WRITE_TIMEOUT_S)
    if not write.done():
        raise UnreadResponse(write)
    if not write.result():
        raise asyncio.CancelledError


async def end_call(context: Context, error: QuireError) -> NoReturn:
    """End the call with the status of an error."""
    if isinstance(error, UnreadResponse):
        error.__traceback__ = None  # frees what the call holds
        await asyncio.wait((error.write,))  # until the client reads after all, or its connection ends
    await context.abort_with_status(to_grpc_status(error))
    raise AssertionError("abort_with_status raises")


async def _write(context: Context, response: object) -> bool:
    """Return whether the response was sent; if not, gRPC would log a traceback."""
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        return False
    return True


def convert_errors(handler: Handler[RequestT, ResponseT]) -> Handler[RequestT, ResponseT]:
    """Turn what the handler raises into a gRPC status; an unexpected exception is logged and becomes INTERNAL."""

    async def converting(self: Any, request: RequestT, context: Context) -> ResponseT:
        try:
            return await handler(self, request, context)
        except QuireError as error:
            await end_call(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            _log.exception("a call failed unexpectedly")
            fault = ProtocolError("the gateway failed on this call; its log has the traceback")
            await end_call(context, fault)

    return converting
