"""Checks of every request before its endpoint runs: the caller, and the size of the body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....proto.errors import InvalidRequest, QuireError
from ...client.wire.tokens import BEARER, Role
from ...text.requests.json_values import JsonSize
from ..admin.services import GatewayServices
from .endpoints.pages import DOCS_FILES, EVENTS_PATH, PAGE_FILES
from .errors import error_response, http_error_response

# Uploads are forms, and no JSON.
FILES_PATH = "/v1/files"
# Far more than the longest conversation that a server takes, MAX_CHAT_CHARS.
MAX_BODY_BYTES = 16 << 20

# Calls that need no token: probes of load balancers have none, and documentation and page are the same everywhere.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/openapi.json", *DOCS_FILES, *PAGE_FILES})

# Path |-> role that its callers need, where that is not USER.
ROLE_OF_PATH = {
    "/load": Role.METRICS,
    "/metrics": Role.METRICS,
    EVENTS_PATH: Role.OPERATOR,
    "/v1/load_lora_adapter": Role.OPERATOR,
    "/v1/unload_lora_adapter": Role.OPERATOR,
    "/sleep": Role.OPERATOR,
    "/wake_up": Role.OPERATOR,
    "/is_sleeping": Role.OPERATOR,
    "/pause": Role.OPERATOR,
    "/resume": Role.OPERATOR,
    "/is_paused": Role.OPERATOR,
    "/update_weights": Role.OPERATOR,
    "/reset_prefix_cache": Role.OPERATOR,
    "/collective_rpc": Role.OPERATOR,
    "/server_info": Role.OPERATOR,
}


class AuthenticateCalls:
    """Middleware that sets `request.state.caller`, and rejects calls without a token whose roles permit them."""

    def __init__(self, app: ASGIApp, services: GatewayServices) -> None:
        self._app = app
        self._authenticator = services.authenticator
        self._on_refused = services.on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := scope["path"]) not in OPEN_PATHS:
            try:
                # A batch's own calls have its caller.
                caller = scope.get("state", {}).get("caller") or self._authenticator.caller(
                    _authorization(scope["headers"])
                )
                caller.require(ROLE_OF_PATH.get(path, Role.USER))
            except QuireError as error:
                self._on_refused(error)
                await error_response(error, path)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


class LimitBody:
    """Middleware that rejects bodies of more than MAX_BODY_BYTES, before they are read if their length is given.

    It also rejects bodies with too many values, before they are parsed.
    """

    def __init__(self, app: ASGIApp, services: GatewayServices) -> None:
        self._app = app
        self._on_refused = services.on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0") if scope["type"] == "http" else b"0"
        if int(length) > MAX_BODY_BYTES:  # the parser has checked that this is a number
            response = http_error_response(scope["method"], scope["path"], self._too_large())
            await response(scope, receive, send)
            return
        num_bytes, size = 0, JsonSize()
        is_json = scope["type"] != "http" or scope["path"] != FILES_PATH

        async def counted_receive() -> Message:
            nonlocal num_bytes
            while True:
                message = await receive()
                body = message.get("body", b"")
                num_bytes += len(body)
                if num_bytes > MAX_BODY_BYTES:
                    raise self._too_large()
                if is_json:
                    size.add(body)
                if not size.is_too_large:
                    return message
                if not message.get("more_body"):
                    raise self._refused(HTTPStatus.BAD_REQUEST, f"has more than {size.limits}")
                # A client that is still sending would not read the response: read the rest, without keeping it.

        await self._app(scope, counted_receive, send)

    def _too_large(self) -> HTTPException:
        problem = f"exceeds {MAX_BODY_BYTES} bytes"
        return self._refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem, {"connection": "close"})

    def _refused(
        self, status: HTTPStatus, problem: str, headers: Mapping[str, str] | None = None
    ) -> HTTPException:
        self._on_refused(InvalidRequest("body", problem))
        return HTTPException(status, f"the body {problem}", dict(headers or {}))


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the Authorization header; Anthropic's clients send their token as x-api-key instead."""
    found = dict(headers)
    if b"authorization" not in found and (key := found.get(b"x-api-key")) is not None:
        return BEARER + key.decode("latin-1")
    authorization = found.get(b"authorization")
    return None if authorization is None else authorization.decode("latin-1")
