"""Conversions between quire's errors and gRPC statuses with google.rpc details.

Every error carries ErrorInfo: the domain, the reason and the metadata. InvalidRequest adds BadRequest, QuotaExceeded
adds QuotaFailure, and every retriable error adds RetryInfo.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from ....proto.errors import (
    InvalidRequest,
    QuireError,
    QuotaExceeded,
    ServerUnreachable,
    from_reason,
    from_status,
)

DOMAIN = "quire"
# In gRPC's words for a server that speaks HTTP/1.1.
# Of a server that expects TLS and cuts the connection at the first byte in the clear.
_CUT_SIGN = "Socket closed"
_HTTP_SIGNS = ("http1.x server", "Expected SETTINGS frame")
# A status travels as trailers, twice: percent-encoded text and base64. gRPC rejects trailers of more than 8 KiB.
MAX_TEXT_BYTES = 1000
MAX_NAME_BYTES = 250

DetailT = TypeVar("DetailT", bound=Message)


def to_grpc_status(error: QuireError) -> grpc.Status:
    """Return the status of an error with all its details."""
    code = code_pb2.Code.Value(error.grpc_status)
    details = [_error_info(error), *map(_packed, _details(error))]
    return rpc_status.to_status(status_pb2.Status(code=code, message=_bounded(str(error)), details=details))


def from_grpc_error(error: grpc.RpcError, waited_for: str) -> QuireError:
    """Return the error that the server raised, or the error of gRPC itself, for example of a server out of reach.

    Args:
        waited_for: name of the server, for errors of gRPC itself.
    """
    status = _rich_status(error)
    info = None if status is None else _detail(status, error_details_pb2.ErrorInfo)
    if status is None or info is None or info.domain != DOMAIN:
        message = f"{waited_for}: {error.details()}"
        if any(sign in message for sign in _HTTP_SIGNS):
            message += (
                "; an HTTP server listens there; give the address of the gRPC server, by default port 50051"
            )
        if _CUT_SIGN in message:
            message += (
                "; if it uses TLS, name the authority of its certificate: --tls-ca FILE, or tls_ca in Python"
            )
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return ServerUnreachable(message)
        return from_status(error.code().name, message)
    retry = _detail(status, error_details_pb2.RetryInfo)
    retry_after_s = None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9
    code = code_pb2.Code.Name(status.code)
    return from_reason(info.reason, code, status.message, info.metadata, retry_after_s)


def _error_info(error: QuireError) -> any_pb2.Any:
    if not error.wire_fields:
        return _plain_error_info(error.reason)
    metadata = {name: _bounded(text, MAX_NAME_BYTES) for name, text in error.metadata.items()}
    return _packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))


@functools.cache  # one per kind of error
def _plain_error_info(reason: str) -> any_pb2.Any:
    return _packed(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))


def _details(error: QuireError) -> Iterator[Message]:
    """Yield the details beside ErrorInfo."""
    if isinstance(error, InvalidRequest):
        field, problem = _bounded(error.field, MAX_NAME_BYTES), _bounded(error.problem)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=problem)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, QuotaExceeded):
        subject = _bounded(f"tenant:{error.tenant}", MAX_NAME_BYTES)
        exceeded = error_details_pb2.QuotaFailure.Violation(subject=subject, description=_bounded(str(error)))
        yield error_details_pb2.QuotaFailure(violations=[exceeded])
    if error.retry_delay_s is not None:
        seconds, nanos = divmod(round(error.retry_delay_s * 1e9), 10**9)
        yield error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))


def _bounded(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text, cut to `max_bytes` of UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[:max_bytes].decode(errors="ignore") + "…"


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _detail(status: status_pb2.Status, kind: type[DetailT]) -> DetailT | None:
    """Return the status's first detail of that type, or None."""
    detail = kind()
    return next((detail for packed in status.details if packed.Unpack(detail)), None)


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        # Works for synchronous and asynchronous calls: both errors have code, details and trailing metadata.
        return rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):  # a proxy rewrote the status: only the plain one is left
        return None
