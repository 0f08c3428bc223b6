"""Images are fetched from allowed hosts, over public addresses, within limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.cluster.text.media import fetch
from quire.cluster.text.media.fetch import ImageFetcher, is_public
from quire.cluster.text.media.image_source import ImageSource
from quire.proto.errors import InvalidRequest

Answer = Callable[[str, asyncio.StreamWriter], Any]


@asynccontextmanager
async def web_server(answer: Answer) -> AsyncIterator[int]:
    """Run a server on this machine; it passes the path of each request to `answer`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        try:
            await answer(head.split()[1], writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def whole(body: bytes, status: str = "200 OK", *headers: str) -> Answer:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return answer


async def fetched(url: str, *domains: str) -> bytes:
    found = await ImageFetcher(domains).fetch_all([("here", ImageSource(url=url, detail="low"))])
    assert found["here"].detail == "low"
    return found["here"].data


async def check_refused(answer: Answer, problem: str, path: str = "/a.png") -> None:
    async with web_server(answer) as port:
        with pytest.raises(InvalidRequest, match=problem):
            await fetched(f"http://127.0.0.1:{port}{path}", f"http://127.0.0.1:{port}")


async def test_file_of_an_allowed_host_is_fetched() -> None:
    async with web_server(whole(b"file")) as port:
        assert await fetched(f"http://127.0.0.1:{port}/a", f"http://127.0.0.1:{port}") == b"file"


@pytest.mark.parametrize(
    ("url", "domains", "problem"),
    [
        ("https://example.com/a", (), "is a URL, which the server does not fetch"),
        (
            "https://other.example/a",
            ("images.example",),
            "host that is not allowed, https://other.example:443",
        ),
        ("https://images.example.evil/a", ("images.example",), "not allowed"),
        ("http://images.example/a", ("images.example",), "not allowed, http://images.example:80"),
        ("https://images.example:22/a", ("images.example",), "not allowed, https://images.example:22"),
        ("https://user@images.example/a", ("images.example",), "another form"),
        ("https://images.example@evil.example/a", ("images.example",), "another form"),
        ("https://169.254.169.254/latest", ("images.example",), "not allowed"),
        ("https://169.254.169.254/latest", ("169.254.169.254",), "an address that is not public"),
        ("https://localhost/a", ("localhost",), "an address that is not public"),
        ("http://2130706433/a", ("http://2130706433",), "not public|cannot be found"),
        ("https://images.example:99999/a", ("images.example",), "cannot be read"),
    ],
)
async def test_url_that_is_not_allowed_is_refused(url: str, domains: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await fetched(url, *domains)


async def test_name_that_resolves_to_an_inner_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "mixed.example": ["8.8.8.8", "10.0.0.1"],
        "inner.example": ["127.0.0.1"],
        "v6.example": ["::ffff:10.0.0.1"],
    }

    async def getaddrinfo(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in answers[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    for host in answers:
        with pytest.raises(InvalidRequest, match=f"an address that is not public, {host}"):
            await fetched(f"https://{host}/a", host)


async def test_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    loop = asyncio.get_running_loop()
    resolve = type(loop).getaddrinfo

    async def getaddrinfo(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        resolved.append(str(host))
        if host == "images.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return list(await resolve(self, host, port, **options))

    monkeypatch.setattr(type(loop), "getaddrinfo", getaddrinfo)
    async with web_server(whole(b"file")) as port:
        found = await fetched(f"http://images.example:{port}/a", f"http://images.example:{port}")
    assert found == b"file"
    assert resolved.count("images.example") == 1


async def test_redirect_passes_the_same_checks() -> None:
    await check_refused(
        whole(b"", "302 Found", "Location: https://evil.example/a"), "not allowed, https://evil.example"
    )
    await check_refused(whole(b"", "302 Found", "Location: http://169.254.169.254/a"), "not allowed")
    await check_refused(whole(b"", "302 Found", "Location: /again"), "redirected more than 3 times")

    async def twice(path: str, writer: asyncio.StreamWriter) -> None:
        answer = whole(b"file") if path == "/b" else whole(b"", "307 Temporary Redirect", "Location: /b")
        await answer(path, writer)

    async with web_server(twice) as port:
        assert await fetched(f"http://127.0.0.1:{port}/a", f"http://127.0.0.1:{port}") == b"file"


async def test_answers_other_than_a_file_are_refused() -> None:
    await check_refused(whole(b"", "404 Not Found"), "answers with status 404")

    async def garbage(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"what is this?\r\n\r\n")

    await check_refused(garbage, "cannot be fetched")


async def test_file_that_is_too_large_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FILE_BYTES", 1000)
    await check_refused(whole(b"x" * 5000), "has more than 1,000 bytes")

    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 100)
            await writer.drain()

    await check_refused(endless, "has more than 1,000 bytes")


@pytest.mark.parametrize("slow_head", [False, True])
async def test_host_that_sends_a_byte_at_a_time_is_cut_at_the_deadline(
    slow_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_TIMEOUT_S", 0.5)

    async def trickle(path: str, writer: asyncio.StreamWriter) -> None:
        if not slow_head:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.05)

    await check_refused(trickle, "was not sent by its host within 0.5 s|cannot be fetched")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True), ("2606:4700::1", True), ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True), ("::", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected
