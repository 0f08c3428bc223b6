"""A server with skip_tokenizer_init: token ids in and out through every API; texts are refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import ThreadedServer, threaded_server

from quire.cluster.client.client import Client
from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingParams

REFUSAL = "needs a tokenizer, and the server runs with skip_tokenizer_init; use token ids"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedServer]:
    folder = tmp_path_factory.mktemp("ids") / "model"
    shutil.copytree(make_model("qwen3", seed=5), folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with threaded_server(folder, skip_tokenizer_init=True) as server:
        yield server


@pytest.fixture
def http(server: ThreadedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/completions", {"prompt": [1, 2], "stop": ["x"]}),
        ("/v1/completions", {"prompt": [1, 2], "bad_words": ["x"]}),
        ("/v1/completions", {"prompt": [1, 2], "echo": True, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [1, 2], "structured_outputs": {"regex": "a"}}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "{{ messages }}"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_text_is_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json={"model": "tiny"} | body)
    assert (response.status_code, REFUSAL in response.text) == (400, True), response.text


def test_token_ids_are_answered_over_http(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for streams in (False, True):
        response = http.post(
            "/v1/completions", json=body | {"return_token_ids": True, "logprobs": 1, "stream": streams}
        )
        assert response.status_code == 200, response.text
        assert '"text":""' in response.text
        assert "token_id:" in response.text
        if not streams:
            assert len(response.json()["choices"][0]["token_ids"]) == 4


def test_body_without_the_type_of_json_is_refused_by_its_header(http: httpx.Client) -> None:
    """As `curl -d` sends it. A page of another site may send this type without being asked for permission."""
    for given in ("application/x-www-form-urlencoded", "text/plain", None):
        headers = {} if given is None else {"content-type": given}
        response = http.post("/v1/completions", content=b'{"prompt": [1]}', headers=headers)
        assert response.status_code == 415, response.text
        assert f"content-type is {given or 'missing'}, must be application/json" in response.text


def test_grpc_answers_token_ids_and_refuses_texts(server: ThreadedServer) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with Client(server.server.target) as client:
        output = client.generate([5, 6, 7], sampling).outputs[0]
        assert (output.text, len(output.token_ids)) == ("", 4)
        for call in (
            lambda: client.generate("Hello", sampling),
            lambda: client.chat(MESSAGES, sampling),
            lambda: client.tokenize("Hello"),
            lambda: client.detokenize([1, 2]),
        ):
            with pytest.raises(InvalidRequest, match=REFUSAL):
                call()
