"""Endpoints of vLLM, llama.cpp and Cohere beside OpenAI's, and collective_rpc of the development mode."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from local_server import ThreadedServer, threaded_server
from pooling_models import as_embedder
from tokenizers import AddedToken, Tokenizer

from quire.cluster.text.requests.infill import InfillTokens

GREEDY = {"temperature": 0, "ignore_eos": True}


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def problem(client: httpx.Client, path: str, **body: Any) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


@pytest.fixture(scope="module")
def filler(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the tokens of StarCoder in place of some of its own."""
    import shutil

    folder = tmp_path_factory.mktemp("filler") / "model"
    shutil.copytree(make_model("llama", vocab_size=1024), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.get_vocab_size() <= 1024
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def infill(filler: Path) -> Iterator[httpx.Client]:
    with threaded_server(filler) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def embedder(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = as_embedder(make_model("qwen3", seed=5), tmp_path_factory.mktemp("embedder"))
    with threaded_server(folder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_infill_continues_the_prompt_between_prefix_and_suffix(infill: httpx.Client) -> None:
    extra = [{"filename": "a.py", "text": "x = 1"}]
    body = {"input_prefix": "def f(", "input_suffix": "return 1", "input_extra": extra, "prompt": "a"}
    whole = post(infill, "/infill", **body, n_predict=4, temperature=0)
    text = "<file_sep>a.py\nx = 1\n<fim_prefix>def f(<fim_suffix>return 1<fim_middle>a"
    tokens = post(infill, "/tokenize", prompt=text)["tokens"]
    same = post(infill, "/v1/completions", prompt=tokens, max_tokens=4, temperature=0, return_token_ids=True)
    assert whole["tokens_evaluated"] == len(tokens)
    assert whole["tokens"] == same["choices"][0]["token_ids"]
    assert whole["stop"] is True
    with infill.stream(
        "POST", "/infill", json=body | {"n_predict": 4, "temperature": 0, "stream": True}
    ) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events][-2:] == [False, True]
    assert events[-1]["stop_type"] == whole["stop_type"]


def test_model_without_the_tokens_cannot_fill_in(http: httpx.Client) -> None:
    found = problem(http, "/infill", input_prefix="a", input_suffix="b")
    assert "has no tokens that mark a prefix, a suffix and a middle" in found


def test_tokens_of_each_family_are_found() -> None:
    deepseek = {
        "<\uff5cfim\u2581begin\uff5c>": 1,
        "<\uff5cfim\u2581hole\uff5c>": 2,
        "<\uff5cfim\u2581end\uff5c>": 3,
    }
    tokens = InfillTokens.of(deepseek)
    assert tokens is not None
    assert tokens.prompt([9], [], [4], [5], []) == [9, 1, 4, 2, 5, 3]
    assert InfillTokens.of({"<fim_prefix>": 1, "<fim_suffix>": 2}) is None


def test_tokenizer_info_describes_the_tokenizer(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["tokenizer_class"]
    assert info["vocab_size"] > 0
    assert "message" in info["chat_template"]
    assert all(set(each) == {"content", "special"} for each in info["added_tokens_decoder"].values())


def test_several_conversations_have_the_choices_of_each(http: httpx.Client) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "What is a quire?")]
    together = post(http, "/v1/chat/completions/batch", messages=chats, max_tokens=6, n=2, **GREEDY)
    alone = [post(http, "/v1/chat/completions", messages=chat, max_tokens=6, n=2, **GREEDY) for chat in chats]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    texts = [choice["message"] for each in alone for choice in each["choices"]]
    assert [choice["message"] for choice in together["choices"]] == texts
    assert together["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in alone)
    assert "stream: is true" in problem(http, "/v1/chat/completions/batch", messages=chats, stream=True)
    assert "messages" in problem(http, "/v1/chat/completions/batch", messages=[])


def test_token_ids_are_continued_by_token_ids(http: httpx.Client) -> None:
    settings = {
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": 2,
        "_all_stop_token_ids": [],
    }
    whole = post(http, "/inference/v1/generate", token_ids=[5, 6, 7], sampling_params=settings)
    same = post(http, "/v1/completions", prompt=[5, 6, 7], max_tokens=4, return_token_ids=True, **GREEDY)
    (choice,) = whole["choices"]
    assert choice["token_ids"] == same["choices"][0]["token_ids"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    def refused(**settings: Any) -> str:
        return problem(http, "/inference/v1/generate", token_ids=[5], sampling_params=settings)

    assert "sampling_params.temperatur: is no setting" in refused(temperatur=1)
    assert "sampling_params.top_p: is 2.0" in refused(top_p=2)
    assert "sampling_params.logit_bias: must have numbers" in refused(logit_bias={"a": 1})
    path, body = "/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}
    assert "stream: is true" in problem(http, path, **body, stream=True)
    assert "token_ids" in problem(http, path, token_ids=[10**6], sampling_params={})


def test_cohere_s_client_gets_each_type_of_embedding(embedder: httpx.Client) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    answer = post(
        embedder, "/v2/embed", texts=["fox", "A book"], input_type="search_query", embedding_types=types
    )
    own = post(embedder, "/v1/embeddings", input=["fox", "A book"])
    floats = answer["embeddings"]["float"]
    assert floats == [each["embedding"] for each in own["data"]]
    for index, vector in enumerate(floats):
        raw = base64.b64decode(answer["embeddings"]["base64"][index])
        assert np.frombuffer(raw, "<f4").tolist() == vector
        bits = np.packbits(np.array(vector) > 0).astype(int)
        assert answer["embeddings"]["ubinary"][index] == bits.tolist()
        assert answer["embeddings"]["binary"][index] == (bits - 128).tolist()
    assert answer["meta"]["billed_units"]["input_tokens"] == own["usage"]["prompt_tokens"]
    long = ["word " * 4000]
    assert post(embedder, "/v2/embed", texts=long)["embeddings"]["float"]
    assert problem(embedder, "/v2/embed", texts=long, truncate="NONE").startswith("texts")


def test_collective_rpc_takes_names_of_a_list(filler: Path) -> None:
    with (
        threaded_server(filler, allows_engine_control=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        (rank,) = post(client, "/collective_rpc", method="rank_status")["results"]
        assert rank["rank"] == 0
        for method in ("reset_prefix_cache", "sleep", "wake_up"):
            assert post(client, "/collective_rpc", method=method)["results"] == [None]
        assert "method: is 'eval'" in problem(client, "/collective_rpc", method="eval", args=["1"])
        assert "args: are not those of sleep" in problem(
            client, "/collective_rpc", method="sleep", kwargs={"depth": 1}
        )


def test_collective_rpc_needs_the_development_mode(server: ThreadedServer, http: httpx.Client) -> None:
    assert http.post("/collective_rpc", json={"method": "rank_status"}).status_code == 404
