"""Requests that outlive the grace period of a shutdown, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_model import PARSERS, chat_model
from local_server import Server, local_server
from serving import ENDLESS, PROMPT, drain, first_delta

from quire import AsyncClient
from quire.proto.errors import ShuttingDown

OPTIONS: dict[str, Any] = PARSERS
MESSAGES = [{"role": "user", "content": PROMPT}]
# path |-> body of a call that does not end by itself
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 400, "temperature": 0, "ignore_eos": True},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 400, "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 400, "temperature": 0},
}
REASON = "the gateway stops, and its grace period of 0.2 s is over"


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))


async def stop(server: Server) -> None:
    assert server.http is not None
    await asyncio.gather(server.gateway.stop(0.2), server.http.stop(0.2))


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def check_error(path: str, body: dict[str, Any]) -> None:
    """Check the form of the path's protocol."""
    if path == "/v1/messages":
        assert body == {"type": "error", "error": {"type": "overloaded_error", "message": REASON}}
    else:
        assert body["error"] == {
            "message": REASON, "type": "server_error", "param": None, "code": "shutting_down",
        }  # fmt: skip


async def test_shutdown_ends_running_requests_with_its_error(model: Path) -> None:
    """Streams end with an error event, the other calls with a status, in the form of their protocol."""

    async def stream(http: httpx.AsyncClient, path: str, has_begun: asyncio.Event) -> None:
        async with http.stream("POST", path, json={**CALLS[path], "stream": True}) as response:
            events = []
            async for event in events_of(response):
                events.append(event)
                has_begun.set()
        check_error(path, events[-1])
        if path == "/v1/responses":
            last = events[-1]
            assert (last["type"], last["code"], last["message"]) == ("error", "shutting_down", REASON)
            assert last["sequence_number"] == len(events) - 1

    async def call(http: httpx.AsyncClient, path: str) -> None:
        response = await http.post(path, json=CALLS[path])
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        check_error(path, response.json())

    async with (
        local_server(model, http=True, **OPTIONS) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
        AsyncClient(server.target) as client,
    ):
        server.brake.slow_down()
        endless = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(endless)
        begun = [asyncio.Event() for _ in CALLS]
        streams = [asyncio.create_task(stream(http, *each)) for each in zip(CALLS, begun, strict=True)]
        for event in begun:
            await event.wait()
        server.brake.hold()
        calls = [asyncio.create_task(call(http, path)) for path in CALLS]
        async with asyncio.timeout(60):
            while server.replica.num_running < 1 + 2 * len(CALLS):
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(stop(server))
        await asyncio.gather(*streams, *calls)
        with pytest.raises(ShuttingDown, match=REASON):
            await drain(endless)
        await stopping
        assert server.replica.num_running == 0


async def test_shutdown_answers_a_request_whose_body_does_not_arrive(model: Path) -> None:
    async with local_server(model, http=True, **OPTIONS) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: 100\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stop(server)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        check_error("/v1/messages", json.loads(body))
        writer.close()
