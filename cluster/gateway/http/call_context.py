"""Calls of the endpoints as GenerationCall: tenant, trace and deadline come from the HTTP request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from fastapi import Request

from ....proto.errors import InvalidRequest, QuireError
from ..admin.services import GatewayServices
from ..generation.generation import GenerationCall

_TRACE_HEADERS = ("traceparent", "tracestate")
# Seconds that the caller waits for the whole output. gRPC has deadlines of its own.
TIMEOUT_HEADER = "x-request-timeout"


def with_context(call: GenerationCall, request: Request, services: GatewayServices) -> GenerationCall:
    """Return the call with its tenant, its trace and its deadline.

    Raises:
        InvalidRequest: the header X-Request-Timeout is not a positive number.
    """
    headers = request.headers
    return replace(
        call,
        tenant=services.authenticator.tenant(request.state.caller, ""),
        timeout_s=_timeout_s(headers.get(TIMEOUT_HEADER)),
        trace_headers={name: headers[name] for name in _TRACE_HEADERS if name in headers},
    )


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("X-Request-Timeout", f"is {text!r}, must be a positive number of seconds")
    return seconds


@contextmanager
def preparing(services: GatewayServices, names: Mapping[str, str]) -> Iterator[None]:
    """Count errors from the block as refused calls, and rename their fields as `renamed_fields` does.

    For what an endpoint does before `GenerationService.run`, which counts its own refusals.
    """
    try:
        with renamed_fields(names):
            yield
    except QuireError as error:
        services.on_refused(error)
        raise


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors from the block the field names of the endpoint: field of quire.v1 |-> field of the endpoint."""
    try:
        yield
    except InvalidRequest as error:
        field, dot, rest = error.field.partition("[")
        if field not in names:
            raise
        raise InvalidRequest(names[field] + dot + rest, error.problem) from error
