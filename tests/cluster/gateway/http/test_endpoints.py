"""Small endpoints, errors of routing, authentication and limits, over one HTTP server."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from deadlines import CALL_TIMEOUT_S
from fastapi import FastAPI
from local_server import ThreadedServer, threaded_server

from quire.cluster.client.wire.tokens import Role, Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.http.connection import ConnectionLimits
from quire.cluster.gateway.http.middleware import MAX_BODY_BYTES, OPEN_PATHS
from quire.cluster.gateway.http.server import create_app
from quire.cluster.os_utils.watched_file import constant


def test_models_lists_the_served_model(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert http.get("/v1/models/tiny").json() == model


def test_unknown_model_is_not_found_in_openai_form(http: httpx.Client) -> None:
    response = http.get("/v1/models/nobody/else")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert "'nobody/else' is not served here; 'tiny' is" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("DELETE", "/v1/models", 405)]
)
def test_routing_errors_have_openai_form(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert path in response.json()["error"]["message"]


def test_wrong_method_is_answered_with_the_right_ones(http: httpx.Client) -> None:
    response = http.put("/v1/responses/resp_x")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, DELETE")


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/load", "/docs"])
def test_probes_answer(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200, response.text
    assert "date" in response.headers
    assert "server" not in response.headers


def test_docs_load_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for path in loaded:
        response = http.get(f"/{path}")
        assert response.status_code == 200, path
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_openapi_document_has_the_endpoints(http: httpx.Client) -> None:
    assert "/v1/models" in http.get("/openapi.json").json()["paths"]


async def preflight(app: FastAPI) -> httpx.Response:
    """Ask as a browser does before a page of another origin calls the server."""
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://server", timeout=CALL_TIMEOUT_S
    ) as client:
        return await client.options("/v1/completions", headers=headers)


def test_pages_of_other_origins_may_call_only_if_they_are_allowed(server: ThreadedServer) -> None:
    services = server.server.services
    for allowed, status in (((), 405), (("https://other.org",), 400), (("https://example.com",), 200)):
        response = server.run(preflight(create_app(services, allowed)))
        assert response.status_code == status
        origin = response.headers.get("access-control-allow-origin")
        assert origin == ("https://example.com" if status == 200 else None)


def test_calls_without_a_permitted_token_are_refused(make_model: Callable[..., Path]) -> None:
    tokens = TokenSet([Token.of("sesame", "gold"), Token.of("gauge", roles=frozenset({Role.METRICS}))])
    with (
        threaded_server(make_model("llama"), security=Security(tokens=constant(tokens))) as server,
        httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
    ):
        for path in OPEN_PATHS:
            assert http.get(path).status_code == 200
        refused = http.get("/v1/models")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "unauthenticated"
        of_anthropic = http.post("/v1/messages", headers={"x-api-key": "guess"})
        assert of_anthropic.status_code == 401
        assert of_anthropic.json()["error"]["type"] == "authentication_error"
        for headers in ({"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
            assert http.get("/v1/models", headers=headers).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "gauge"}).status_code == 403
        for path in ("/load", "/metrics"):
            assert http.get(path, headers={"x-api-key": "gauge"}).status_code == 200
            assert http.get(path, headers={"x-api-key": "sesame"}).status_code == 403


def test_large_bodies_are_refused_before_they_are_read(server: ThreadedServer) -> None:
    refusals = server.server.services.monitor.requests.refusals
    before = refusals["invalid_request"]
    with connection(server) as sock:
        head = f"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        sock.sendall(head.encode())
        assert status_line(sock).startswith(b"HTTP/1.1 413 ")
    assert refusals["invalid_request"] - before == 1


@pytest.mark.parametrize(
    "sent", [b"NOT HTTP\r\n\r\n", b"GET / HTTP/x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n"]
)
def test_malformed_requests_are_answered_in_openai_form(server: ThreadedServer, sent: bytes) -> None:
    with connection(server) as sock:
        sock.sendall(sent)
        response = read_all(sock)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b'"type":"invalid_request_error"' in response


def test_slow_heads_are_refused(make_model: Callable[..., Path]) -> None:
    limits = ConnectionLimits(head_timeout_s=1.0)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    with (
        threaded_server(make_model("llama"), http_limits=limits, ready=False) as server,
        ExitStack() as stack,
    ):
        connections = []
        for sent in (b"", b"\r\n", head):
            connections.append(stack.enter_context(connection(server)))
            connections[-1].sendall(sent)
        for each in connections:
            assert read_all(each).startswith(b"HTTP/1.1 408 ")


def test_large_heads_and_connections_beyond_the_limit_are_refused(make_model: Callable[..., Path]) -> None:
    limits = ConnectionLimits(max_connections=1, max_head_bytes=1000)
    with (
        threaded_server(make_model("llama"), http_limits=limits, ready=False) as server,
        connection(server) as first,
    ):
        first.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status_line(first).startswith(b"HTTP/1.1 200 ")
        with connection(server) as second:
            assert read_all(second).startswith(b"HTTP/1.1 503 ")
        first.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 2000)
        assert b"HTTP/1.1 431 " in read_all(first)


def connection(server: ThreadedServer) -> socket.socket:
    url = httpx.URL(server.url)
    assert url.port is not None
    return socket.create_connection((url.host, url.port), timeout=60)


def status_line(sock: socket.socket) -> bytes:
    return sock.makefile("rb").readline()


def read_all(sock: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    return sock.makefile("rb").read()
