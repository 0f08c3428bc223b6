"""What every gRPC handler of quire does alike: its errors become statuses, and its calls say who makes them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc.aio

from ...proto.errors import ProtocolError, QuireError
from ..api.grpc_status import to_grpc_status

_log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[[Any, RequestT, grpc.aio.ServicerContext[Any, Any]], Awaitable[ResponseT]]


def answering_errors(handler: Handler[RequestT, ResponseT]) -> Handler[RequestT, ResponseT]:
    """Turns what the handler raises into a gRPC status; a fault of ours is logged, and INTERNAL."""

    async def answering(
        self: Any, request: RequestT, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ResponseT:
        try:
            return await handler(self, request, context)
        except QuireError as error:
            await context.abort_with_status(to_grpc_status(error))
        except grpc.aio.AbortError:
            raise
        except Exception:
            _log.exception("a call failed")
            fault = ProtocolError("the gateway failed on this call; its log says why")
            await context.abort_with_status(to_grpc_status(fault))
        raise AssertionError("abort raises")

    return answering


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes | None:
    """The call's metadata entry that carries its token."""
    return dict(metadata or ()).get("authorization")
