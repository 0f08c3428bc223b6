"""Connections that try to take the server's time or memory with what surrounds their calls, over sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer
from loop_stall import shortest_stall
from serving import eventually

from quire.cluster.gateway.http.connection import HEADERS_READ, ConnectionLimits

LIMITS = ConnectionLimits()
# In rounds of 100,000. Unquoting a cookie of 16 kB takes more than 500.
MAX_STALL = 120.0
MAX_STALL_OF_CALLS = 15.0
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n"
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = TOKENIZE + b"transfer-encoding: chunked\r\n"


@pytest.fixture
def address(server: ThreadedServer) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=CALL_TIMEOUT_S) as client:
        yield client


def answer(client: socket.socket, *sent: bytes) -> bytes:
    """Send all of it, and return what the server sends until it closes the connection."""
    try:
        for part in sent:
            client.sendall(part)
    except ConnectionError:  # it is refused before it is sent
        pass
    received = b""
    try:
        while part := client.recv(1 << 16):
            received += part
    except ConnectionError:  # what was still on its way when the server closed
        pass
    return received


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def test_cookie_is_not_unquoted(server: ThreadedServer, address: tuple[str, int]) -> None:
    cookie = b'cookie: a="' + b"\\\\" * (8 << 10) + b'"\r\n'

    def answered() -> None:
        with socket.create_connection(address, timeout=CALL_TIMEOUT_S) as client:
            assert status(answer(client, HEALTH + CLOSE + cookie + b"\r\n")) == 200

    assert server.run(shortest_stall(partial(asyncio.to_thread, answered), MAX_STALL)) <= MAX_STALL


@pytest.mark.parametrize("name", sorted(HEADERS_READ))
def test_header_that_is_read_is_bounded(client: socket.socket, name: bytes) -> None:
    value = b"0" * (LIMITS.max_value_bytes + 1)
    assert status(answer(client, HEALTH + name + b": " + value + b"\r\n\r\n")) in (400, 431)


def test_length_of_many_digits_is_read(client: socket.socket) -> None:
    body = b'{"prompt": "x"}'
    length = b"%0*d" % (LIMITS.max_value_bytes, len(body))
    response = answer(client, TOKENIZE + CLOSE + b"content-length: " + length + b"\r\n\r\n" + body)
    assert status(response) == 200


def test_header_that_is_not_read_may_fill_the_head(client: socket.socket) -> None:
    assert status(answer(client, HEALTH + CLOSE + b"x: " + b"y" * (60 << 10) + b"\r\n\r\n")) == 200


def test_long_url_is_refused(client: socket.socket) -> None:
    url = b"/health?" + b"a&" * (LIMITS.max_url_bytes // 2)
    assert status(answer(client, b"GET " + url + b" HTTP/1.1\r\nhost: x\r\n\r\n")) == 414


@pytest.mark.parametrize("is_after_body", [False, True])
@pytest.mark.parametrize(
    "line", [b"a:\r\n", b"a: " + b"b" * (2 << 20) + b"\r\n"], ids=["many_trailers", "long_trailer"]
)
def test_trailers_are_bounded(client: socket.socket, is_after_body: bool, line: bytes) -> None:
    body = b"100000\r\n" + b" " * (1 << 20) + b"\r\n" if is_after_body else b""
    response = answer(client, CHUNKED + b"\r\n" + body + b"0\r\n" + line * (-(-(2 << 20) // len(line))))
    assert status(response) == 431
    assert b"trailers and chunk extensions: exceed 65536 bytes" in response


def test_chunk_extensions_are_bounded(client: socket.socket) -> None:
    chunk = b"1;" + b"a" * 1000 + b"\r\n \r\n"
    assert status(answer(client, CHUNKED + b"\r\n" + chunk * 200)) == 431


def test_body_in_chunks_of_one_byte_is_read(client: socket.socket) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    response = answer(client, CHUNKED + CLOSE + b"\r\n" + chunks + b"0\r\nx: y\r\n\r\n")
    assert status(response) == 200


@pytest.mark.parametrize("num_bytes", [1, 16 << 10])
def test_body_is_read_although_an_upgrade_is_offered(client: socket.socket, num_bytes: int) -> None:
    """Java's HttpClient sends these headers."""
    body = b'{"prompt": "x"}'
    length = b"content-length: %d\r\n" % len(body)
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\n"
    sent = b"\r\n".join([TOKENIZE + upgrade + length, body + TOKENIZE + CLOSE + length, body])
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    response = answer(client, *[sent[at : at + num_bytes] for at in range(0, len(sent), num_bytes)])
    assert response.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("target", [b"x:443", b"/health"])
def test_tunnel_is_refused(client: socket.socket, target: bytes) -> None:
    assert status(answer(client, b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\n\r\nGET")) == 400


def test_trailer_is_no_header(client: socket.socket) -> None:
    """The endpoint would refuse the deadline."""
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    head = CHUNKED.replace(b"/tokenize", b"/v1/completions") + CLOSE
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    response = answer(client, head + b"\r\n" + chunk + b"0\r\nx-request-timeout: soon\r\n\r\n")
    assert status(response) == 200


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "pipelined", [HEALTH + b"\r\n", TOKENIZE + b"content-length: 9\r\n\r\n{"], ids=["whole", "part"]
)
def test_client_that_leaves_after_a_pipelined_request_is_noticed(
    server: ThreadedServer, client: socket.socket, pipelined: bytes, is_stream: bool
) -> None:
    brake = server.server.brake

    async def is_idle() -> bool:
        return server.server.replica.num_running == 0

    brake.slow_down()
    try:
        client.sendall(generate(max_tokens=400, ignore_eos=True, stream=is_stream) + pipelined)
        server.wait_until_running()
        brake.catch()  # the request cannot end before it is noticed
        client.close()
        server.run(eventually(is_idle))
    finally:
        brake.release()
        brake.speed_up()


def test_pipelined_requests_are_answered_in_order(client: socket.socket) -> None:
    requests = [
        generate(max_tokens=5),
        *[HEALTH + b"\r\n"] * (LIMITS.max_pipelined - 1),
        HEALTH + CLOSE + b"\r\n",
    ]
    response = answer(client, b"".join(requests))
    assert response.count(b"HTTP/1.1 200 ") == len(requests)
    assert status(response) == 200
    assert b"text_completion" in response.split(b"HTTP/1.1 200 ")[1]


@pytest.mark.parametrize(
    "pipelined",
    [
        (HEALTH + b"\r\n") * (LIMITS.max_pipelined + 1),
        TOKENIZE + b"content-length: 99999\r\n\r\n" + b" " * 99_999,
    ],
    ids=["many", "large"],
)
def test_pipelined_requests_beyond_the_limit_end_the_connection(
    server: ThreadedServer, client: socket.socket, pipelined: bytes
) -> None:
    server.server.brake.hold()
    try:
        assert answer(client, generate(max_tokens=400, ignore_eos=True) + pipelined) == b""
    finally:
        server.server.brake.release()


@pytest.mark.parametrize("ending", [b"", b"{}"], ids=["closed", "answered"])
def test_calls_that_arrive_together_do_not_stall_the_event_loop(
    server: ThreadedServer, address: tuple[str, int], ending: bytes
) -> None:
    """Neither their heads, nor the ends of their bodies or of their connections."""
    head = TOKENIZE + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n"

    def statuses(clients: list[socket.socket]) -> set[int]:
        return {status(client.recv(1 << 16)) for client in clients}

    async def call_together() -> None:
        with ExitStack() as stack:
            last, *clients = [
                stack.enter_context(socket.create_connection(address, timeout=CALL_TIMEOUT_S))
                for _ in range(401)
            ]
            for client in clients:
                client.sendall(head)
            assert await asyncio.to_thread(statuses, clients) == {100}
            for client in clients:
                client.sendall(ending) if ending else client.close()
            if ending:
                assert await asyncio.to_thread(statuses, clients) == {400}
            assert status(await asyncio.to_thread(answer, last, HEALTH + CLOSE + b"\r\n")) == 200

    with socket.create_connection(address, timeout=CALL_TIMEOUT_S) as first:
        first.sendall(TOKENIZE + b"content-length: 2\r\n\r\n{}")
        assert statuses([first]) == {400}  # the first call of a kind takes longer
    assert server.run(shortest_stall(call_together, MAX_STALL_OF_CALLS)) <= MAX_STALL_OF_CALLS


def generate(**fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "x", **fields}).encode()
    head = TOKENIZE.replace(b"/tokenize", b"/v1/completions")
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
