"""Calls over HTTP that are refused before their bodies are validated."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from quire.cluster.gateway.access.authentication import ANYONE, Authenticator
from quire.cluster.gateway.generation.generation import CallHead
from quire.cluster.gateway.http.early_refusal import MAX_BYTES, RefuseWithoutRoom
from quire.proto.errors import ModelNotFound, Overloaded, QuireError

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "demo", "prompt": "It was", "priority": 3}


class FullGeneration:
    """A service that has no room.

    Attributes:
        asked: the calls that it refused.
    """

    def __init__(self, error: QuireError | None = None) -> None:
        self.asked: list[CallHead] = []
        self.is_full = True
        self._error = error or Overloaded("full", retry_after_s=1.5)

    def has_refused(self, tenant: str) -> bool:
        return self.is_full

    def check_room(self, head: CallHead) -> None:
        self.asked.append(head)
        raise self._error


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await JSONResponse({"body": body.decode()})(scope, receive, send)


def post(generation: FullGeneration, *parts: str, path: str = PATH, **headers: str) -> httpx.Response:
    """Return the response of the middleware before `echo`.

    Args:
        parts: of the body, as they arrive.
    """
    services: Any = SimpleNamespace(generation=generation, authenticator=Authenticator())
    length = sum(map(len, parts))
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (name.encode(), value.encode())
            for name, value in {"content-length": f"{length}", **headers}.items()
        ],
        "state": {"caller": ANYONE},
    }
    arrived = [
        {"type": "http.request", "body": part.encode(), "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return arrived.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(RefuseWithoutRoom(echo, services)(scope, receive, send))
    start, body = sent
    return httpx.Response(start["status"], headers=start["headers"], content=body["body"])


def test_call_without_room_is_refused() -> None:
    generation = FullGeneration()
    headers = {"x-request-timeout": "2.5", "traceparent": "00-1-2-01"}
    response = post(generation, json.dumps(BODY), **headers)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.json()["error"]["code"] == "overloaded"
    assert generation.asked == [CallHead("demo", "", "", -3, 2.5, {"traceparent": "00-1-2-01"})]


def test_refusal_has_the_form_of_the_protocol() -> None:
    response = post(FullGeneration(), json.dumps(BODY), path="/v1/messages")
    assert response.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[" * MAX_BYTES,
        "[]",
        '{"model": 3}',
        '{"request_id": null}',
        '{"priority": true}',
        '{"priority": 1.5}',
        '{"background": true}',
        json.dumps(BODY | {"prompt": "a" * MAX_BYTES}),
    ],
)
def test_other_bodies_are_left_to_the_endpoint(body: str) -> None:
    generation = FullGeneration()
    assert post(generation, body).json() == {"body": body}
    assert generation.asked == []


def test_invalid_deadline_is_left_to_the_endpoint() -> None:
    generation, body = FullGeneration(), json.dumps(BODY)
    assert post(generation, body, **{"x-request-timeout": "soon"}).json() == {"body": body}
    assert generation.asked == []


def test_unknown_model_is_left_to_the_endpoint() -> None:
    body = json.dumps(BODY)
    assert post(FullGeneration(ModelNotFound("no")), body).json() == {"body": body}


def test_other_paths_are_left_to_the_endpoint() -> None:
    body = json.dumps(BODY)
    assert post(FullGeneration(), body, path="/v1/embeddings").json() == {"body": body}


def test_body_is_not_read_while_there_is_room() -> None:
    generation, body = FullGeneration(), json.dumps(BODY)
    generation.is_full = False
    assert post(generation, body).json() == {"body": body}
    assert generation.asked == []


def test_body_in_parts_reaches_the_endpoint_whole() -> None:
    generation = FullGeneration()
    assert post(generation, '{"model":', ' "demo"}').json() == {"body": '{"model": "demo"}'}
    assert generation.asked == []
