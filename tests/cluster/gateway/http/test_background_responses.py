"""Responses that are made in the background: fetched, streamed from any place, cancelled and dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from chat_model import PARSERS, chat_model, write_output
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, local_server, threaded_server

from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.http import response_store
from quire.cluster.gateway.http.response_store import EventLog
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import RequestNotFound

DEADLINE_S = 60.0
REPLY = "Call me at noon, and bring the map of the whole coast."
CALL: Any = {"model": "tiny", "input": "When?", "temperature": 0, "background": True}
OPTIONS: Any = PARSERS
LONG: Any = {**CALL, "max_output_tokens": 300}
ENDED = "completed", "incomplete", "failed", "cancelled"


@pytest.fixture(scope="module")
def client(server: ThreadedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@contextmanager
def slowed(server: ThreadedServer) -> Iterator[None]:
    server.server.brake.slow_down()
    try:
        yield
    finally:
        server.server.brake.speed_up()


def until_text(stream: Any) -> str:
    """Read until the first text; return the response's id."""
    response_id = ""
    for event in stream:
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            return response_id
    raise AssertionError("the stream has no text")


def until_ended(client: openai.OpenAI, response_id: str) -> Any:
    """Return the response once it has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while (response := client.responses.retrieve(response_id)).status not in ENDED:
        assert time.monotonic() < deadline, response.status
        time.sleep(0.01)
    return response


def test_response_runs_although_no_client_waits(server: ThreadedServer, client: openai.OpenAI) -> None:
    write_output(server, REPLY)
    server.server.brake.hold()
    begun = client.responses.create(**CALL)
    assert (begun.status, begun.background) == ("queued", True)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: is a response that is queued"):
        client.responses.create(model="tiny", input="x", previous_response_id=begun.id)
    server.server.brake.release()
    ended = until_ended(client, begun.id)
    assert (ended.status, ended.output_text) == ("completed", REPLY)
    assert ended.usage.output_tokens > 0
    assert client.responses.cancel(begun.id).status == "completed"
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_stream_continues_after_any_event(server: ThreadedServer, client: openai.OpenAI) -> None:
    write_output(server, REPLY)
    with client.responses.create(stream=True, **CALL) as stream:
        first: Any = next(iter(stream))  # the client leaves
    response_id = first.response.id
    whole: list[Any] = list(client.responses.retrieve(response_id, stream=True))
    assert [event.type for event in whole[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert whole[-1].type == "response.completed"
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    deltas = [event.delta for event in whole if event.type == "response.output_text.delta"]
    assert "".join(deltas) == REPLY
    for after in range(len(whole)):
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
        assert rest == whole[after + 1 :]


def test_response_that_is_cancelled_frees_its_blocks(server: ThreadedServer, client: openai.OpenAI) -> None:
    with slowed(server), client.responses.create(stream=True, **LONG) as stream:
        response_id = until_text(stream)
        cancelled: Any = client.responses.cancel(response_id)
        assert [event.type for event in stream if "delta" not in event.type] == []
    assert cancelled.status == "cancelled"
    assert [item.status for item in cancelled.output] == ["incomplete"]
    server.wait_until_free()
    assert client.responses.retrieve(response_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is a response that is cancelled"):
        client.responses.create(model="tiny", input="x", previous_response_id=response_id)


def test_response_that_is_dropped_ends(server: ThreadedServer, client: openai.OpenAI) -> None:
    with slowed(server), client.responses.create(stream=True, **LONG) as stream:
        response_id = until_text(stream)
        client.responses.delete(response_id)
    server.wait_until_free()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_response_of_the_foreground_is_neither_streamed_again_nor_cancelled(
    server: ThreadedServer, client: openai.OpenAI
) -> None:
    made = client.responses.create(model="tiny", input="When?", max_output_tokens=2)
    assert made.background is False
    with pytest.raises(
        openai.BadRequestError, match="stream: needs a response that was created with background"
    ):
        client.responses.retrieve(made.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="response_id: is not of a response"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="background: needs a response that is stored"):
        client.responses.create(store=False, **CALL)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")


def test_responses_beyond_the_limit_are_refused(
    server: ThreadedServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "MAX_BACKGROUND", 1)
    server.server.brake.hold()
    begun = client.responses.create(**LONG)
    with pytest.raises(openai.InternalServerError, match="1 responses run in the background"):
        client.responses.create(**CALL)
    server.server.brake.release()
    client.responses.cancel(begun.id)


def test_tenant_runs_as_many_responses_as_are_free(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "MAX_BACKGROUND", 3)
    security = Security(tokens=constant(TokenSet([Token.of("sesame", "gold"), Token.of("poppy", "zinc")])))
    model = chat_model(make_model("llama"), tmp_path)
    with (
        threaded_server(model, security=security, **OPTIONS) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": "sesame"}, timeout=CALL_TIMEOUT_S) as gold,
        httpx.Client(base_url=server.url, headers={"x-api-key": "poppy"}, timeout=CALL_TIMEOUT_S) as zinc,
    ):

        def begin(tenant: httpx.Client) -> httpx.Response:
            return tenant.post("/v1/responses", json=LONG)

        server.server.brake.hold()
        begun = [begin(gold), begin(gold)]
        assert [each.status_code for each in begun] == [200, 200]
        refused = begin(gold)
        assert refused.status_code == 429
        assert "'gold' has reached its limit of 2 background responses" in refused.text
        assert [begin(zinc).status_code for _ in "12"] == [200, 503]
        server.server.brake.release()
        for each in begun:
            gold.post(f"/v1/responses/{each.json()['id']}/cancel")
        assert begin(gold).status_code == 200


async def test_shutdown_ends_a_response_with_its_reason(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = chat_model(make_model("llama"), tmp_path)
    async with (
        local_server(model, http=True, **OPTIONS) as server,
        httpx.AsyncClient(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
    ):
        assert server.http is not None
        server.brake.slow_down()
        body = {name: value for name, value in LONG.items() if name != "model"}
        begun = (await http.post("/v1/responses", json=body)).json()
        events = http.stream("GET", f"/v1/responses/{begun['id']}", params={"stream": True})
        async with events as response:
            await asyncio.gather(server.gateway.stop(0.2), server.http.stop(0.2))
            lines = [line async for line in response.aiter_lines()]
        assert "shutting_down" in lines[-2], lines[-3:]


async def test_events_that_are_too_many_are_dropped() -> None:
    log = EventLog(max_bytes=20)
    log.add(b"event: a\n\n")
    reader = log.read()
    assert await anext(reader) == b"event: a\n\n"
    log.add(b"event: b\n\nevent: c\n\n")
    with pytest.raises(RequestNotFound, match="more than 20 bytes of events"):
        await anext(reader)
    log.add(b"event: d\n\n")
    assert log.num_bytes == 0
