"""Streams over HTTP that continue after the last event of the client, at the same gateway or at another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_model import PARSERS, chat_model
from local_replica import LocalReplica, local_replica
from local_server import local_config, local_gateway
from serving import DEADLINE_S

from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.http.stream_position import StreamPosition
from quire.cluster.text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    PromptLogprobsDelta,
    Usage,
)
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.errors import InvalidRequest
from quire.scheduler.core.replies import retained_outputs

COMPLETION = "/v1/completions", {"prompt": "The quick", "max_tokens": 6, "n": 2, "return_token_ids": True}
CHAT = (
    "/v1/chat/completions",
    {
        "messages": [{"role": "user", "content": "When?"}],
        "max_tokens": 6,
        "logprobs": True,
        "n": 2,
    },
)
TOOLS = (
    "/v1/chat/completions",
    {
        "messages": [{"role": "user", "content": "When?"}],
        "tools": [
            {
                "type": "function",
                "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
            }
        ],
    },
)
REPLY = '<think>Hm.</think>I ask.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
COMMON = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "request_id": "r",
    "resumable": True,
    "ignore_eos": True,
}

Event = tuple[str, Any]  # its id, empty if it has none, and its data


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def two_gateways(model: Path) -> AsyncIterator[tuple[LocalReplica, list[httpx.AsyncClient]]]:
    """A replica and clients of two gateways that serve it."""
    with local_replica(local_config(model, **PARSERS)) as replica:
        async with _gateway(replica) as first, _gateway(replica) as second:
            yield replica, [first, second]


@asynccontextmanager
async def _gateway(replica: LocalReplica) -> AsyncIterator[httpx.AsyncClient]:
    client = ReplicaClient(replica.address, "replica-0", heartbeat_s=0.1)
    async with local_gateway(replica.config, client, http=True) as gateway:
        await asyncio.wait_for(gateway.gateway.wait_ready(), DEADLINE_S)
        assert gateway.http is not None
        async with httpx.AsyncClient(base_url=gateway.http.url, timeout=DEADLINE_S) as http:
            yield http


async def read(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], last: str = "", most: int | None = None
) -> list[Event]:
    """Return the events of a stream; leave it after the first `most`."""
    headers = {"last-event-id": last} if last else {}
    events: list[Event] = []
    async with http.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        event_id = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                events.append((event_id, value if value == "[DONE]" else json.loads(value)))
                event_id = ""
                if len(events) == most:
                    break
    return events


def outcome(events: list[Event]) -> dict[Any, Any]:
    """Return what the events add up to, however the output was cut into them; without times."""
    found: dict[Any, Any] = {"done": [data for _, data in events].count("[DONE]")}
    for _, data in events:
        if data == "[DONE]":
            continue
        if not data["choices"]:
            found["usage"] = data["usage"]["completion_tokens"], data["usage"]["prompt_tokens"]
        for choice in data["choices"]:
            parts = found.setdefault(choice["index"], {})
            for name, text in _texts(choice):
                parts[name] = parts.get(name, "") + text
            parts.setdefault("tokens", []).extend(choice.get("token_ids") or [])
            parts.setdefault("logprobs", []).extend((choice.get("logprobs") or {}).get("content") or [])
            parts.setdefault("ends", []).extend(filter(None, [choice["finish_reason"]]))
    return found


def _texts(choice: dict[str, Any]) -> list[tuple[str, str]]:
    delta = choice.get("delta", {})
    texts = [(name, delta[name] or "") for name in ("role", "content", "reasoning_content") if name in delta]
    texts += [("text", choice["text"])] if "text" in choice else []
    for call in delta.get("tool_calls", []):
        function = call["function"]
        texts += [
            (f"name {call['index']}", function.get("name", "")),
            (f"ids {call['index']}", "1" if "id" in call else ""),
        ]
        texts.append((f"arguments {call['index']}", function["arguments"]))
    return texts


@pytest.mark.parametrize("kind", ["completion", "chat", "tools"])
async def test_another_gateway_continues_after_every_event(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A scripted reply cannot be computed again: the replica keeps it as long as a busy machine takes for the test.
    monkeypatch.setattr(retained_outputs, "RETENTION_S", 3600.0)
    path, fields = {"completion": COMPLETION, "chat": CHAT, "tools": TOOLS}[kind]
    body = COMMON | fields
    async with two_gateways(model) as (replica, (first, second)):
        if kind == "tools":
            tokens = replica_tokens(model, REPLY)
            replica.script.write(tokens)
            body["max_tokens"] = len(tokens)
        whole = await read(first, path, body)
        ids = [event_id for event_id, data in whole if data != "[DONE]" and data["choices"]]
        assert all(ids)
        assert len(set(ids)) == len(ids) > 2
        for number in range(1, len(whole)):
            last = max((event_id for event_id, _ in whole[:number] if event_id), key=ids.index)
            num_received = ids.index(last) + 1
            rest = await read(second, path, body, last)
            assert outcome(whole[:num_received] + rest) == outcome(whole)
            assert outcome(whole)["done"] == 1
        if kind == "tools":
            message = outcome(whole)[0]
            assert message["ids 0"] == "1"
            assert (message["name 0"], json.loads(message["arguments 0"])) == ("now", {"a": 1})
            assert message["reasoning_content"] == "Hm."


def replica_tokens(model: Path, text: str) -> list[int]:
    return Tokenizer(str(model)).encode(text, add_special_tokens=False)


async def test_client_that_left_reads_on_at_its_gateway(model: Path) -> None:
    path, fields = COMPLETION
    body = COMMON | fields | {"seed": 5}
    async with two_gateways(model) as (_, (http, _)):
        whole = await read(http, path, body | {"request_id": "whole"})
        begun = await read(http, path, body, most=2)
        rest = await read(http, path, body, begun[-1][0])
        assert outcome(begun + rest) == outcome(whole)


async def test_another_gateway_continues_a_stream_that_still_runs(model: Path) -> None:
    path, fields = CHAT
    body = COMMON | fields | {"seed": 5, "logprobs": False, "max_tokens": 400}
    async with two_gateways(model) as (replica, (first, second)):
        whole = await read(first, path, body | {"request_id": "whole"})
        replica.brake.slow_down()
        begun = await read(first, path, body, most=2)
        await asyncio.to_thread(replica.brake.catch)  # no gateway can have read the end
        reading = asyncio.create_task(read(second, path, body, begun[-1][0]))
        replica.brake.speed_up()
        replica.brake.release()
        assert outcome(begun + await reading) == outcome(whole)


@pytest.mark.parametrize(
    ("changes", "last", "problem"),
    [
        ({}, "5.x", "must be the id of an event"),
        ({}, "1.1.0.0.0" + ".0-1-a-0" * 17, "must be the id of an event"),
        ({}, "1.1.0.0.0.2-1-a-0", "another n"),
        ({"resumable": False}, "1.1.0.0.0.0-1-a-0", "needs resumable"),
        ({"request_id": ""}, "", "needs a request_id"),
        ({"echo": True}, "", "cannot be combined with echo"),
        ({"logprobs": 1}, "", "cannot be combined with echo or logprobs"),
    ],
)
def test_wrong_resumption_is_refused(http: httpx.Client, changes: Any, last: str, problem: str) -> None:
    path, fields = COMPLETION
    headers = {"last-event-id": last} if last else {}
    response = http.post(path, json=COMMON | fields | changes, headers=headers)
    assert response.status_code == 400, response.text
    assert problem in response.json()["error"]["message"]


def test_other_output_than_the_received_one_is_not_joined(http: httpx.Client) -> None:
    path, fields = COMPLETION
    body = COMMON | fields | {"request_id": "another"}  # the tests share the server
    response = http.post(path, json=body, headers={"last-event-id": "1.1.0.0.0.0-1-abc-0"})
    assert response.status_code == 404
    assert "differs from what was received" in response.json()["error"]["message"]


def test_stream_that_is_not_resumable_has_no_ids(http: httpx.Client) -> None:
    path, fields = CHAT
    response = http.post(path, json=COMMON | fields | {"request_id": "", "resumable": False})
    assert "data: " in response.text
    assert "id: " not in response.text.replace('"id":', "")


def test_position_is_the_same_after_its_text() -> None:
    position = StreamPosition()
    position.take(1, PromptLogprobsDelta(1, [5, 6], [{}, {}]))
    position.take(2, CompletionDelta(1, "a", [2**31 - 1, 0], sequence_number=1, is_last=True))
    usage = Usage(3, 2, cached_tokens=16, reasoning_tokens=2)
    position.take(3, CompletionFinished(1, "length", None, usage))
    position.take(4, CompletionDelta(0, "b", [7], sequence_number=2))
    assert StreamPosition.parse(str(position)) == position
    assert (
        str(position)
        == "4.2.2.16.2.1-2-"
        + f"{position.resume_position.outputs[1].checksum:x}-3.0-1-{position.resume_position.outputs[0].checksum:x}-0"
    )


@pytest.mark.parametrize(
    "text", ["", "1", "1.2.3.4", "-1.0.0.0.0", "1.0.0.0.0.", "1.0.0.0.0.0-1-a", "1.0.0.0.0.0-1-a-4"]
)
def test_malformed_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must be the id of an event"):
        StreamPosition.parse(text)
