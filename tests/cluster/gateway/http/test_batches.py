"""Files and batches with the official openai package: results, owners, restarts, cancellation and limits."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from local_replica import DEADLINE_S
from local_server import ThreadedServer, threaded_server
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.http import batch_store
from quire.cluster.gateway.http.batch_runner import BatchRunner
from quire.cluster.gateway.http.batch_store import BatchStore, has_ended
from quire.cluster.gateway.http.endpoints.batches import parse_form
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import ConfigError, InvalidRequest, QuotaExceeded, RequestNotFound

PATH: Literal["/v1/completions"] = "/v1/completions"


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


def client_of(server: ThreadedServer, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=token, max_retries=0)


@contextmanager
def serving(model: Path, folder: Path, **options: Any) -> Iterator[tuple[ThreadedServer, openai.OpenAI]]:
    with threaded_server(model, batch_dir=folder, **options) as server, client_of(server) as client:
        yield server, client


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def upload(client: openai.OpenAI, bodies: Iterable[dict[str, Any]], path: str = PATH) -> str:
    lines = [
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": path, "body": body})
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def begin(client: openai.OpenAI, file_id: str) -> str:
    return client.batches.create(input_file_id=file_id, endpoint=PATH, completion_window="24h").id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"))
    return client.batches.retrieve(batch_id)


def answers(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in client.files.content(file_id).content.splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines), "no request has two answers"
    return found


def test_batch_has_the_answers_of_its_requests(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (_, client):
        greedy = {"max_tokens": 3, "temperature": 0}
        bodies = [{"prompt": [5, 6 + n], **greedy} for n in range(40)] + [{"prompt": "x", "n": 0}]
        file_id = upload(client, bodies)
        assert client.files.retrieve(file_id).filename == "in.jsonl"
        batch = ended(client, begin(client, file_id))
        assert batch.status == "completed"
        assert batch.request_counts.to_dict() == {"total": 41, "completed": 40, "failed": 1}
        made = answers(client, batch.output_file_id)
        plain = client.completions.create(model="tiny", prompt=[5, 9], **greedy)  # type: ignore[call-overload]
        assert made["r3"]["body"]["choices"][0]["text"] == plain.choices[0].text
        (failed,) = answers(client, batch.error_file_id).values()
        assert failed["status_code"] == 400
        assert {each.id for each in client.files.list()} == {
            file_id,
            batch.output_file_id,
            batch.error_file_id,
        }
        assert [each.id for each in client.batches.list()] == [batch.id]
        client.files.delete(file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)


def test_batch_goes_on_after_a_restart(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (server, client):
        server.server.brake.slow_down()
        file_id = upload(client, [{"prompt": [5, 6 + n % 90], "max_tokens": 20} for n in range(100)])
        batch_id = begin(client, file_id)
        until(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0)  # type: ignore[union-attr]
    with serving(model, tmp_path) as (_, client):
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        assert len(answers(client, batch.output_file_id)) == 100


def test_cancelled_batch_keeps_its_answers_and_frees_its_blocks(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (server, client):
        server.server.brake.slow_down()
        file_id = upload(client, [{"prompt": [5, 6 + n % 90], "max_tokens": 20} for n in range(100)])
        batch_id = begin(client, file_id)
        until(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0)  # type: ignore[union-attr]
        assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
        batch = ended(client, batch_id)
        assert batch.status == "cancelled"
        assert len(answers(client, batch.output_file_id)) == batch.request_counts.completed < 100
        server.server.brake.speed_up()
        server.wait_until_free()


def test_batch_of_wrong_lines_fails(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (_, client):
        for file_id, problem in (
            (client.files.create(file=("x", b"{"), purpose="batch").id, "line 1: is not JSON"),
            (upload(client, [{}], path="/v1/embeddings"), "must be the batch's endpoint"),
        ):
            batch = ended(client, begin(client, file_id))
            assert batch.status == "failed"
            assert problem in batch.errors.data[0].message
            assert str(tmp_path) not in batch.errors.data[0].message


def test_files_and_batches_are_their_tenants(model: Path, tmp_path: Path) -> None:
    tokens = TokenSet([Token.of("sesame", "a"), Token.of("poppy", "b")])
    with (
        serving(model, tmp_path, security=Security(tokens=constant(tokens))) as (server, _),
        client_of(server, "sesame") as owner,
        client_of(server, "poppy") as other,
    ):
        file_id = upload(owner, [{"prompt": "x", "max_tokens": 1}])
        batch_id = begin(owner, file_id)
        ended(owner, batch_id)
        for call in (
            lambda: other.files.content(file_id),
            lambda: other.batches.retrieve(batch_id),
            lambda: other.batches.cancel(batch_id),
            lambda: begin(other, file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert not list(other.files.list()) + list(other.batches.list())


def test_requests_without_an_answer_at_the_deadline_expire(tmp_path: Path) -> None:
    """Also those that the server was too busy for until then."""

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"{}", 429)(scope, receive, send)

    async def scenario() -> tuple[dict[str, Any], list[int]]:
        store = BatchStore(tmp_path)
        lines = b"".join(b'{"custom_id": "%d", "url": "/v1/x", "body": {}}\n' % n for n in range(3))
        file_id = store.add_file("t", "x", "batch", lines)["id"]
        batch = {
            "id": store.new_id("batch"), "object": "batch", "status": "validating", "input_file_id": file_id,
            "endpoint": "/v1/x", "created_at": 0, "expires_at": time.time() + 1,
        }  # fmt: skip
        store.put("t", batch)
        runner = BatchRunner(store, busy)
        runner.start()
        async with asyncio.timeout(DEADLINE_S):
            while not has_ended(made := store.get("t", "batch", str(batch["id"]))):
                await asyncio.sleep(0.05)
        content = store.content_path("t", made["error_file_id"]).read_bytes()
        await runner.stop()
        return made, [json.loads(line)["response"]["status_code"] for line in content.splitlines()]

    made, statuses = asyncio.run(scenario())
    assert made["status"] == "expired"
    assert statuses == [408] * 3
    assert made["request_counts"] == {"total": 3, "completed": 0, "failed": 3}


def test_there_are_no_batches_without_a_directory(server: ThreadedServer, http: httpx.Client) -> None:
    assert http.post("/v1/batches", json={}).status_code == 404
    assert "/v1/files" not in http.get("/openapi.json").json()["paths"]


def test_store_is_of_one_gateway_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises(ConfigError, match="used by another gateway"):
        BatchStore(tmp_path)
    monkeypatch.setattr(batch_store, "MAX_TOTAL_BYTES", 2000)
    entry = store.add_file("t", "x", "batch", b"1" * 1000)
    with pytest.raises(QuotaExceeded):
        store.add_file("t", "x", "batch", b"1" * 1000)
    store.add_file("u", "x", "batch", b"1" * 1000)
    for wrong in ("../x", "file-1", f"{entry['id']}/..", entry["id"].replace("file", "batch")):
        with pytest.raises(RequestNotFound):
            store.get("t", "file", wrong)
    monkeypatch.setattr(time, "time", lambda: entry["expires_at"] + 1)
    assert store.entries("t", "file") == []
    assert not store.content_path("t", entry["id"]).exists()
    store.close()


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("application/json", b"{}"), ("multipart/form-data", b""), ("multipart/form-data; boundary=", b"--")],
)
def test_bodies_that_are_no_forms_are_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a form"):
        parse_form(content_type, body)


def test_form_of_any_bytes_is_read_in_linear_time() -> None:
    kind = "multipart/form-data; boundary=x"
    assert parse_form(kind, b"\r\n--x" * 4_000_000) == {}
    assert parse_form(kind, b'--x\r\nA: b; name="file"; filename="f"\r\n\r\n1\r\n2\r\n--x--\r\n') == {
        "file": ("f", b"1\r\n2")
    }
    assert parse_form(kind, b"--x\r\n" + b'name="' * 2_000_000) == {}


def chat_model_of(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    return folder


def test_batch_of_messages_has_a_result_for_each(model: Path, tmp_path: Path) -> None:
    import anthropic

    conversation = {"max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}]}
    chat = tmp_path / "chat"
    shutil.copytree(model, chat)
    (chat / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with (
        serving(chat, tmp_path / "batches") as (server, client),
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
    ):
        requests: Any = [
            {"custom_id": "good", "params": {"model": "tiny", **conversation}},
            {"custom_id": "wrong", "params": {"model": "tiny", **conversation, "temperature": 5}},
        ]
        batches = claude.messages.batches
        batch = batches.create(requests=requests)
        assert batch.id.startswith("msgbatch_")
        until(lambda: batches.retrieve(batch.id).processing_status == "ended")
        counts = batches.retrieve(batch.id).request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (1, 1, 0)
        found = {each.custom_id: each.result for each in batches.results(batch.id)}
        assert found["good"].type == "succeeded"
        assert found["good"].message.usage.output_tokens == 3
        assert found["wrong"].type == "errored"
        assert "temperature" in found["wrong"].error.error.message
        assert [each.id for each in batches.list(limit=1)] == [batch.id]
        assert list(client.batches.list()) == [], "OpenAI's list has OpenAI's batches"
        with pytest.raises(anthropic.NotFoundError):
            batches.retrieve("msgbatch_" + "0" * 32)
        with pytest.raises(anthropic.BadRequestError, match="custom_id twice"):
            batches.create(requests=requests[:1] * 2)
        assert batches.delete(batch.id).id == batch.id
        with pytest.raises(anthropic.NotFoundError):
            batches.retrieve(batch.id)


def test_cancelled_batch_of_messages_names_what_was_not_run(model: Path, tmp_path: Path) -> None:
    import anthropic

    with (
        serving(chat_model_of(model, tmp_path), tmp_path / "batches") as (server, _),
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
    ):
        params: Any = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
        batches = claude.messages.batches
        server.server.brake.hold()
        batch = batches.create(requests=[{"custom_id": "held", "params": params}])
        with pytest.raises(anthropic.BadRequestError, match="must be of one that ended"):
            batches.delete(batch.id)
        batches.cancel(batch.id)
        until(lambda: batches.retrieve(batch.id).processing_status == "ended")
        assert [each.result.type for each in batches.results(batch.id)] == ["canceled"]
        assert batches.retrieve(batch.id).request_counts.canceled == 1
        server.server.brake.release()
        server.wait_until_free()
