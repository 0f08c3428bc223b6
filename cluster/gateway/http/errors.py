"""Errors of the HTTP server: every QuireError has a status and a body in the form of the protocol that was called."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from ....proto.errors import InvalidRequest, QuireError
from .json_bodies import json_bytes
from .schema.request_model import FIELD_ERROR

# Endpoints below this path speak Anthropic's protocol.
ANTHROPIC_PATH = "/v1/messages"

UNEXPECTED = "the server failed on this request; its log has the traceback"

# HTTP status |-> `error.type` of the protocol. Other 4xx are invalid requests; other 5xx are failures of the server.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_CLIENT_CLOSED_REQUEST = 499

# Of a value that is not valid.
MAX_SHOWN_CHARS = 100
# Further problems that are named beside the first.
MAX_OTHERS = 3

_log = logging.getLogger(__name__)


class ClientLeft(Exception):
    """The client closed its connection before the response was complete; nobody reads an answer."""


class OpenAIErrorDetails(BaseModel):
    """The member `error` of OpenAI's form.

    Attributes:
        code: quire's reason in lower case.
        param: field of the request.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(BaseModel):
    """An error in OpenAI's form."""

    error: OpenAIErrorDetails


class AnthropicErrorDetails(BaseModel):
    """The member `error` of Anthropic's form."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetails


Responses = dict[int | str, dict[str, Any]]

# Responses of endpoints that speak OpenAI's or Anthropic's protocol, beside those that succeed.
OPENAI_ERRORS: Responses = {
    "4XX": {"model": OpenAIErrorBody, "description": "The call is refused."},
    "5XX": {"model": OpenAIErrorBody, "description": "The server cannot serve the call now."},
}
ANTHROPIC_ERRORS: Responses = {
    "4XX": {"model": AnthropicErrorBody, "description": "The call is refused."},
    "5XX": {"model": AnthropicErrorBody, "description": "The server cannot serve the call now."},
}
# The response of an endpoint that streams if it is asked to.
WHOLE_OR_STREAM: Responses = {
    200: {
        "description": "The whole response, or a stream of events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def openai_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return an error in OpenAI's form."""
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json_bytes({"error": {"message": message, "type": kind, "param": param, "code": code}})


def anthropic_body(status: int, message: str) -> bytes:
    """Return an error in Anthropic's form."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return json_bytes({"type": "error", "error": {"type": kind, "message": message}})


def openai_error(error: QuireError) -> bytes:
    """Return the body of an error in OpenAI's form."""
    param = field_name(error.field) if isinstance(error, InvalidRequest) else None
    return openai_body(error.http_status, message_of(error), code=error.reason.lower(), param=param)


def openai_error_event(error: QuireError) -> bytes:
    """Return the last events of a stream that failed."""
    return b"data: " + openai_error(error) + b"\n\ndata: [DONE]\n\n"


def anthropic_error(error: QuireError) -> bytes:
    """Return the body of an error in Anthropic's form."""
    return anthropic_body(error.http_status, message_of(error))


def message_of(error: QuireError) -> str:
    """Return the error's message, with the field as HTTP clients know it."""
    if isinstance(error, InvalidRequest):
        return f"{field_name(error.field)}: {error.problem}"
    return str(error)


def field_name(field: str) -> str:
    """Return the HTTP name of a field of quire.v1."""
    if field.startswith("chat.template_options"):
        return field.replace("chat.template_options", "chat_template_kwargs", 1)
    for group in ("sampling.", "chat."):
        field = field.removeprefix(group)
    return field


def error_body(error: QuireError, path: str, status: int) -> bytes:
    """Return the body of an error in the form of the path's protocol, for a status that may not be its own."""
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_body(status, message_of(error))
    return openai_body(status, message_of(error), code=error.reason.lower())


def error_response(error: QuireError, path: str) -> Response:
    """Return the response to a call of the path that failed with this error."""
    body = anthropic_error(error) if path.startswith(ANTHROPIC_PATH) else openai_error(error)
    delay_s = error.retry_delay_s
    headers = {} if delay_s is None else {"retry-after": str(math.ceil(delay_s))}
    return _response(error.http_status, body, headers)


def http_error_response(method: str, path: str, error: HTTPException) -> Response:
    """Return the response to a call that is wrong as HTTP, for example in its path, its method or its size."""
    message = f"{method} {path}: {error.detail}"
    return _response(error.status_code, _body(path, error.status_code, message), error.headers)


def install_error_handlers(app: FastAPI, on_refused: Callable[[QuireError], None]) -> None:
    """Answer every failure in the form of the protocol that was called; nobody sees a traceback.

    Args:
        on_refused: receives the error of each call whose body is not valid.
    """

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        if isinstance(
            error.body, bytes
        ):  # was not read as JSON; a page of another site may send other types unasked
            given = request.headers.get("content-type", "missing")
            problem = f"content-type is {given[:100]}, must be application/json"
            return await _on_http_error(request, HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, problem))
        invalid = describe_validation_error(error)
        on_refused(invalid)
        return error_response(invalid, request.url.path)

    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def _on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = http_error_response(request.method, request.url.path, error)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and (methods := _methods_of(request)):
        response.headers["allow"] = ", ".join(methods)
    return response


def _methods_of(request: Request) -> list[str]:
    """Return the methods of all endpoints of the path: starlette's own error has those of the first one only."""
    found = [
        operations
        for path, operations in request.app.openapi()["paths"].items()
        if compile_path(path)[0].match(request.url.path)
    ]
    return [method.upper() for operations in found for method in operations]


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)  # is not sent: nobody is there


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed unexpectedly", request.method, request.url.path, exc_info=error)
    return _response(500, _body(request.url.path, 500, UNEXPECTED))


def _body(path: str, status: int, message: str) -> bytes:
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_body(status, message)
    return openai_body(status, message, code=HTTPStatus(status).name.lower())


def _response(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def describe_validation_error(error: RequestValidationError) -> InvalidRequest:
    """Return the first problem, followed by short forms of the next ones."""
    problems = [_describe(each) for each in error.errors()[: 1 + MAX_OTHERS]]
    (field, problem), *others = problems
    more = "".join(f"; {name}: {text}" for name, text in others if name != field)
    return InvalidRequest(field, problem + more)


def _describe(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field and its problem."""
    kind, message = error["type"], str(error["msg"])
    message = message.removeprefix("Value error, ")
    if kind == "json_invalid":
        return "body", f"is not valid JSON: {error.get('ctx', {}).get('error', message)}"
    if kind == FIELD_ERROR:
        return error["ctx"]["field"], message
    field = _field(error["loc"])
    if kind == "missing":
        return field, "is missing" if field != "body" else "is missing, must be a JSON object"
    if kind == "value_error":
        return field, message
    return field, f"is {_shown(error.get('input'))}: {message[:1].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """Return the beginning of the value's repr, whose whole may be of any length."""
    shown = ""
    for piece in _pieces(value):
        shown += piece
        if len(shown) > MAX_SHOWN_CHARS:
            return shown[:MAX_SHOWN_CHARS] + "..."
    return shown


def _pieces(value: Any) -> Iterator[str]:
    """Yield the repr of a JSON value, without the ends of long texts."""
    if isinstance(value, list):
        yield "["
        for index, each in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(each)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, each) in enumerate(value.items()):
            yield f"{', ' if index else ''}{name[: MAX_SHOWN_CHARS + 1]!r}: "
            yield from _pieces(each)
        yield "}"
    else:
        yield repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str | bytes) else value)


def _field(location: Sequence[str | int]) -> str:
    """Return ``messages[0].content`` for ("body", "messages", 0, "content"), without the branches of unions."""
    parts = (
        list(location[1:])
        if location and location[0] in ("body", "query", "path", "header")
        else list(location)
    )
    field = ""
    for part in parts:
        if isinstance(part, int):
            field += f"[{part}]"
        elif len(part) <= MAX_SHOWN_CHARS and part.isidentifier() and not part[:1].isupper():
            field += f".{part}" if field else part
    return field or "body"
