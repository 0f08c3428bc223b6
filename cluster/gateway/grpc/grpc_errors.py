"""convert_errors: decorator that turns the errors of gRPC handlers into statuses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from ....proto.errors import ProtocolError, QuireError
from .timed_responses import end_call

_log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[[Any, RequestT, grpc.aio.ServicerContext[Any, Any]], Awaitable[ResponseT]]


def convert_errors(handler: Handler[RequestT, ResponseT]) -> Handler[RequestT, ResponseT]:
    """Turn what the handler raises into a gRPC status; an unexpected exception is logged and becomes INTERNAL."""

    async def converting(
        self: Any, request: RequestT, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ResponseT:
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
