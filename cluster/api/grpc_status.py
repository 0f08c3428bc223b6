"""Conversions between quire's errors and gRPC statuses with google.rpc details."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from ...proto.errors import InvalidRequest, QuireError, from_status

DOMAIN = "quire"


def to_grpc_status(error: QuireError) -> grpc.Status:
    """Return the status of an error, with its class name and, for InvalidRequest, the invalid field."""
    details = [_packed(error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN))]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    code = code_pb2.Code.Value(error.grpc_status)
    return rpc_status.to_status(status_pb2.Status(code=code, message=str(error), details=details))


def from_grpc_error(error: grpc.RpcError, waited_for: str) -> QuireError:
    """Return the error that the server raised, or the error of gRPC itself, for example of a server out of reach.

    Args:
        waited_for: name of the server, for errors of gRPC itself.
    """
    status = _rich_status(error)
    if status is None:
        return from_status(error.code().name, f"{waited_for}: {error.details()}")
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return InvalidRequest(violation.field, violation.description)
    return from_status(code_pb2.Code.Name(status.code), status.message)


def _packed(detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        # Works for synchronous and asynchronous calls: both errors have code, details and trailing metadata.
        return rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:  # a proxy rewrote the status: only the plain one is left
        return None
