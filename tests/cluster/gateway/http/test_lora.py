"""Adapters of a running server: loaded, named by requests, listed and unloaded, over HTTP and gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import merge, write_adapter
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, threaded_server
from reference import Reference

from quire import Client, LoraInfo, SamplingParams
from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import InvalidRequest, LoraLoadError, ModelNotFound

PROMPT = [5, 9, 11, 40, 7]
LENGTH = 10
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}


@dataclass(frozen=True)
class Adapted:
    """A model, adapters by name, and the expected tokens by name; the model's own are those of `tiny`."""

    model: Path
    paths: dict[str, Path]
    expected: dict[str, list[int]]


@pytest.fixture(scope="module")
def adapted(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    model, root = make_model("llama", seed=7), tmp_path_factory.mktemp("adapters")
    paths = {name: write_adapter(root / name, model, seed=seed) for seed, name in enumerate(("sql", "law"))}
    folders = {"tiny": model} | {
        name: merge(root / f"{name}-merged", model, path) for name, path in paths.items()
    }
    expected = {name: Reference(folder).generate(PROMPT, LENGTH) for name, folder in folders.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    return Adapted(model, paths, expected)


@pytest.fixture(scope="module")
def server(adapted: Adapted) -> Iterator[ThreadedServer]:
    with threaded_server(
        adapted.model,
        allows_lora_updates=True,
        lora_modules=(("law", str(adapted.paths["law"])),),
        **ADAPTERS,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def grpc_client(server: ThreadedServer) -> Iterator[Client]:
    with Client(server.server.target) as client:
        yield client


def complete(http: httpx.Client, model: str) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def load(http: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def tokens_of(client: Client, model: str) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    return client.generate(PROMPT, params, model=model).outputs[0].token_ids


def test_adapter_of_the_command_line_is_served_and_listed(
    http: httpx.Client, grpc_client: Client, adapted: Adapted
) -> None:
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert models["law"]["parent"] == "tiny"
    assert models["law"]["root"] == str(adapted.paths["law"])
    assert models["tiny"]["parent"] is None
    assert http.get("/v1/models/law").json()["id"] == "law"
    assert tokens_of(grpc_client, "law") == adapted.expected["law"]
    assert tokens_of(grpc_client, "tiny") == tokens_of(grpc_client, "") == adapted.expected["tiny"]
    assert complete(http, "law")["model"] == "law"


def test_adapter_is_loaded_used_and_unloaded_at_run_time(
    http: httpx.Client, grpc_client: Client, adapted: Adapted
) -> None:
    response = load(http, "sql", adapted.paths["sql"])
    assert (response.status_code, response.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert tokens_of(grpc_client, "sql") == adapted.expected["sql"]
    assert load(http, "sql", adapted.paths["sql"]).status_code == 400
    assert load(http, "sql", adapted.paths["law"], load_inplace=True).status_code == 200
    assert tokens_of(grpc_client, "sql") == adapted.expected["law"]
    assert unload(http, "sql").status_code == 200
    assert unload(http, "sql").status_code == 404
    with pytest.raises(ModelNotFound, match="model 'sql' is not served here"):
        tokens_of(grpc_client, "sql")


def test_adapter_is_loaded_and_unloaded_by_operators(grpc_client: Client, adapted: Adapted) -> None:
    path = str(adapted.paths["sql"])
    grpc_client.load_lora("mine", path)
    assert LoraInfo("mine", path, "tiny") in grpc_client.loras()
    assert tokens_of(grpc_client, "mine") == adapted.expected["sql"]
    with pytest.raises(InvalidRequest, match="is 'mine', which is loaded already"):
        grpc_client.load_lora("mine", path)
    with pytest.raises(InvalidRequest, match="is 'tiny', which is served already"):
        grpc_client.load_lora("tiny", path)
    grpc_client.unload_lora("mine")
    assert [each.name for each in grpc_client.loras()] == ["law"]


def test_failed_load_leaves_nothing(
    http: httpx.Client, grpc_client: Client, adapted: Adapted, tmp_path: Path
) -> None:
    response = load(http, "gone", tmp_path / "gone")
    assert response.status_code == 400
    assert "no such directory" in response.json()["error"]["message"]
    too_large = write_adapter(tmp_path / "large", adapted.model, rank=40)
    with pytest.raises(LoraLoadError, match="r is 40, must be from 1 to 16"):
        grpc_client.load_lora("large", str(too_large))
    assert [each.name for each in grpc_client.loras()] == ["law"]
    assert load(http, "", adapted.paths["sql"]).status_code == 400
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "x"}).status_code in (400, 422)
    assert tokens_of(grpc_client, "law") == adapted.expected["law"]


@pytest.mark.parametrize(
    "num_cycles", [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_loads_and_unloads_under_traffic_lose_nothing(
    num_cycles: int, server: ThreadedServer, http: httpx.Client, grpc_client: Client, adapted: Adapted
) -> None:
    """Requests of the model and of an adapter run meanwhile, and each new adapter is used once."""
    may_stop, wrong = threading.Event(), list[Any]()
    num_done = dict.fromkeys(("tiny", "law"), 0)

    def send_requests(model: str) -> None:
        with Client(server.server.target) as client:
            while not may_stop.is_set():
                try:
                    tokens = tokens_of(client, model)
                except Exception as error:
                    wrong.append(error)
                    return
                num_done[model] += 1
                if tokens != adapted.expected[model]:
                    wrong.append((model, tokens))

    threads = [threading.Thread(target=send_requests, args=(model,)) for model in num_done]
    for thread in threads:
        thread.start()
    try:
        for cycle in range(num_cycles):
            name = f"cycle{cycle % 3}"
            assert load(http, name, adapted.paths["sql"]).status_code == 200
            assert tokens_of(grpc_client, name) == adapted.expected["sql"]
            assert unload(http, name).status_code == 200
    finally:
        may_stop.set()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert min(num_done.values()) > 0
    server.wait_until_free()
    lora = server.server.scheduler.lora
    assert lora is not None
    assert lora.num_in_memory <= 2
    assert {each.name for each in lora.references} <= {"law", "sql", "mine"}


def test_endpoints_are_absent_unless_allowed(adapted: Adapted) -> None:
    with (
        threaded_server(adapted.model, **ADAPTERS) as server,
        httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
    ):
        assert load(http, "sql", adapted.paths["sql"]).status_code == 404
        with Client(server.server.target) as client:
            client.load_lora("sql", str(adapted.paths["sql"]))
            assert tokens_of(client, "sql") == adapted.expected["sql"]


def test_users_may_not_change_adapters(adapted: Adapted) -> None:
    security = Security(tokens=constant(TokenSet([Token.of("secret")])))
    with (
        threaded_server(adapted.model, allows_lora_updates=True, security=security, **ADAPTERS) as server,
        httpx.Client(
            base_url=server.url, headers={"authorization": "Bearer secret"}, timeout=CALL_TIMEOUT_S
        ) as http,
    ):
        response = load(http, "sql", adapted.paths["sql"])
        assert response.status_code == 403
        assert http.get("/v1/models").status_code == 200
