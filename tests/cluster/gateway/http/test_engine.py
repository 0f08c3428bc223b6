"""Pause, sleep and other weights of a running server, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_model import chat_model
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, threaded_server
from reference import Reference
from serving import eventually

from quire import Client, SamplingParams
from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import InvalidRequest, ReplicaUnavailable, RequestAborted

PROMPT = [5, 9, 11, 40, 7]
LENGTH = 10
COMMANDS = ("/sleep", "/wake_up", "/pause", "/resume", "/update_weights")


@dataclass(frozen=True)
class Trained:
    """Two sets of weights of one model, and the tokens of each."""

    folders: tuple[Path, Path]
    expected: tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def trained(make_model: Callable[..., Path]) -> Trained:
    folders = make_model("llama", seed=21), make_model("llama", seed=22)
    first, second = (Reference(folder).generate(PROMPT, LENGTH) for folder in folders)
    assert first != second
    return Trained(folders, (first, second))


@pytest.fixture(scope="module")
def server(trained: Trained) -> Iterator[ThreadedServer]:
    with threaded_server(trained.folders[0], allows_engine_control=True) as server:
        yield server


@pytest.fixture
def http(server: ThreadedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture
def grpc_client(server: ThreadedServer) -> Iterator[Client]:
    with Client(server.server.target) as client:
        yield client


def body(**others: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **others,
    }


def complete(http: httpx.Client) -> dict[str, Any]:
    """Return the only choice of a completion."""
    response = http.post("/v1/completions", json=body())
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def update(http: httpx.Client, folder: Path, version: str) -> None:
    response = http.post("/update_weights", json={"path": str(folder), "version": version})
    assert response.status_code == 200, response.text
    assert response.json() == {"weights_version": version}


def wait_until(server: ThreadedServer, condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    server.run(eventually(holds))


def sampling(**others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, **others)


def test_reset_forgets_the_cached_prefixes(http: httpx.Client) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 1}

    def num_cached() -> int:
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    assert http.post("/reset_prefix_cache").status_code == 200
    assert num_cached() == 0


def test_server_info_has_the_configuration(server: ThreadedServer, http: httpx.Client) -> None:
    config = http.get("/server_info").json()["config"]
    assert config["model"]["name"] == "tiny"
    assert config["cache"]["block_size"] == server.server.config.cache.block_size


def test_every_answer_has_the_version_of_its_weights(
    server: ThreadedServer, http: httpx.Client, grpc_client: Client, trained: Trained
) -> None:
    update(http, trained.folders[1], "step-1")
    choice = complete(http)
    assert choice["token_ids"] == trained.expected[1]
    assert choice["weights_version"] == "step-1"
    with http.stream("POST", "/v1/completions", json=body(stream=True)) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    ends = [each["choices"][0] for each in events if each["choices"][0]["finish_reason"]]
    assert [end["weights_version"] for end in ends] == ["step-1"]
    (output,) = grpc_client.generate(PROMPT, sampling()).outputs
    assert (output.token_ids, output.weights_version) == (trained.expected[1], "step-1")
    *_, end = grpc_client.generate_stream(PROMPT, sampling())
    assert getattr(end, "weights_version", None) == "step-1"
    server.await_status()
    (replica,) = grpc_client.status()
    assert replica.weights_version == "step-1"

    grpc_client.update_weights(str(trained.folders[0]), version="step-2")
    assert complete(http)["token_ids"] == trained.expected[0]
    assert complete(http)["weights_version"] == "step-2"


def test_chats_have_the_version_of_their_weights(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"messages": messages, "max_tokens": 4, "temperature": 0}
    with (
        threaded_server(folder, allows_engine_control=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert "weights_version" not in http.post("/v1/chat/completions", json=chat).text
        update(http, folder, "v")
        assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["weights_version"] == "v"
        answer = http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 4})
        assert answer.json()["weights_version"] == "v"
        answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 4})
        assert answer.json()["weights_version"] == "v"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"path": "/missing/weights"}, "missing"),
        ({"path": "weights"}, "must be absolute"),
        ({"path": ""}, "has 0 characters"),
        ({"version": ""}, "has 0 characters"),
        ({"version": "x" * 300}, "has 300 characters"),
        ({"mode": "never"}, "must be one of keep, wait, abort"),
        ({"model": "other"}, "is not served here"),
    ],
)
def test_wrong_updates_are_refused_and_change_nothing(
    change: dict[str, str], problem: str, http: httpx.Client, trained: Trained
) -> None:
    before = complete(http)
    values = {"path": str(trained.folders[1]), "version": "wrong", **change}
    response = http.post("/update_weights", json=values)
    assert response.status_code in (400, 404)
    assert problem in response.json()["error"]["message"]
    assert complete(http) == before


def test_sleeping_server_refuses_requests_until_it_wakes(
    server: ThreadedServer, http: httpx.Client, grpc_client: Client
) -> None:
    before = complete(http)
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep?level=1").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    response = http.post("/v1/completions", json=body())
    assert response.status_code == 503
    assert "wake them up first" in response.json()["error"]["message"]
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200
    assert not grpc_client.is_ready()
    server.await_status()
    (replica,) = grpc_client.status()
    assert (replica.sleep_level, replica.problem) == (1, "the engine sleeps; wake it up first")
    assert http.post("/wake_up").status_code == 200
    assert complete(http) == before
    assert http.get("/ready").status_code == 200


def test_server_that_wakes_in_parts_refuses_requests_until_all_is_awake(
    http: httpx.Client, grpc_client: Client
) -> None:
    before = complete(http)
    for wake in (
        lambda tag: http.post(f"/wake_up?tags={tag}").raise_for_status(),
        lambda tag: grpc_client.wake_up([tag]),
    ):
        assert http.post("/sleep").status_code == 200
        wake("weights")
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/v1/completions", json=body()).status_code == 503
        wake("kv_cache")
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert complete(http) == before
    assert http.post("/sleep").status_code == 200
    response = http.post("/wake_up?tags=weights&tags=kv")
    assert response.status_code == 400
    assert "have 'kv', must be of weights, kv_cache" in response.json()["error"]["message"]
    assert http.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert complete(http) == before


def test_discarded_weights_must_be_replaced_before_waking(grpc_client: Client, trained: Trained) -> None:
    grpc_client.sleep(level=2)
    with pytest.raises(InvalidRequest, match="update_weights must name others first"):
        grpc_client.wake_up()
    grpc_client.update_weights(str(trained.folders[0]), version="again")
    grpc_client.wake_up()
    (output,) = grpc_client.generate(PROMPT, sampling()).outputs
    assert (output.token_ids, output.weights_version) == (trained.expected[0], "again")
    with pytest.raises(InvalidRequest, match="level: is 3, must be 1 or 2"):
        grpc_client.sleep(level=3)


def test_requests_wait_while_the_server_is_paused(
    server: ThreadedServer, http: httpx.Client, grpc_client: Client
) -> None:
    before = complete(http)
    assert http.post("/pause").json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, http)
        wait_until(server, lambda: server.server.scheduler.num_waiting == 1)
        assert http.get("/health").status_code == 200
        server.await_status()
        (replica,) = grpc_client.status()
        assert replica.paused
        assert http.post("/resume").json() == {"status": "resumed"}
        assert waiting.result(60) == before
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_pause_aborts_what_runs_if_it_shall(server: ThreadedServer, grpc_client: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        server.server.brake.hold()
        running = pool.submit(grpc_client.generate, PROMPT, sampling())
        wait_until(server, lambda: server.server.scheduler.num_running == 1)
        server.server.brake.release()
        grpc_client.pause(mode="wait")
        assert len(running.result(60).outputs[0].token_ids) == LENGTH
        waiting = pool.submit(grpc_client.generate, PROMPT, sampling())
        wait_until(server, lambda: server.server.scheduler.num_waiting == 1)
        grpc_client.pause(mode="abort")
        with pytest.raises(RequestAborted, match="an operator's command aborted all requests"):
            waiting.result(60)
    grpc_client.resume()
    server.wait_until_free()


def test_endpoints_are_absent_unless_allowed(trained: Trained) -> None:
    security = Security(tokens=constant(TokenSet([Token.of("secret")])))
    headers = {"authorization": "Bearer secret"}
    with (
        threaded_server(trained.folders[0]) as server,
        httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
    ):
        assert {http.post(path).status_code for path in COMMANDS} == {404}
    with (
        threaded_server(trained.folders[0], allows_engine_control=True, security=security) as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=CALL_TIMEOUT_S) as http,
    ):
        assert {http.post(path).status_code for path in COMMANDS} == {403}
        assert http.get("/is_sleeping").status_code == 403


def test_call_for_a_sleeping_server_ends_with_the_reason(grpc_client: Client) -> None:
    grpc_client.sleep()
    with pytest.raises(ReplicaUnavailable, match="wake them up first"):
        grpc_client.generate(PROMPT, sampling())
    grpc_client.wake_up()
    assert grpc_client.generate(PROMPT, sampling()).outputs[0].token_ids
