"""/v1/embeddings, /classify, /score and /rerank of the HTTP server, and Embed of quire.v1, with tiny models."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from local_server import ThreadedServer, threaded_server
from pooling_models import EmbeddingReference, as_classifier, as_embedder

from quire.proto import inference_pb2, inference_pb2_grpc

TOLERANCE = 1e-4
TEXTS = ["The quick brown fox", "A book of many quires", "crew"]


@pytest.fixture(scope="module")
def generator(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", seed=5)


@pytest.fixture(scope="module")
def server(generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    with threaded_server(as_embedder(generator, tmp_path_factory.mktemp("embedder"))) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = as_classifier(generator, tmp_path_factory.mktemp("classifier"), 1)
    with threaded_server(folder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: ThreadedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(generator: Path) -> list[np.ndarray]:
    """Reference embeddings of TEXTS."""
    from transformers import AutoTokenizer

    tokenizer, reference = AutoTokenizer.from_pretrained(generator), EmbeddingReference(generator)
    return [reference.embed(tokenizer.encode(text)) for text in TEXTS]


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def problem(client: httpx.Client, path: str, **body: Any) -> tuple[int, str]:
    response = client.post(path, json=body)
    return response.status_code, response.json()["error"]["message"]


def test_openai_client_reads_embeddings(client: openai.OpenAI, vectors: list[np.ndarray]) -> None:
    """Its default encoding is base64."""
    response = client.embeddings.create(model="tiny", input=TEXTS)
    assert [entry.index for entry in response.data] == [0, 1, 2]
    for entry, expected in zip(response.data, vectors, strict=True):
        np.testing.assert_allclose(entry.embedding, expected, atol=TOLERANCE)
    floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for entry, same in zip(response.data, floats.data, strict=True):
        np.testing.assert_allclose(entry.embedding, same.embedding, atol=1e-6)
    assert response.usage.prompt_tokens == response.usage.total_tokens > len(TEXTS)


def test_openai_client_sends_token_ids_and_dimensions(
    client: openai.OpenAI, http: httpx.Client, vectors: list[np.ndarray]
) -> None:
    ids = [post(http, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    for given, expected in ((ids, vectors), (ids[1], vectors[1:2])):
        response = client.embeddings.create(model="tiny", input=given, dimensions=6)
        num_tokens = len(ids[1]) if given is ids[1] else sum(map(len, ids))
        assert response.usage.prompt_tokens == num_tokens
        for entry, vector in zip(response.data, expected, strict=True):
            cut = vector[:6] / np.linalg.norm(vector[:6])
            np.testing.assert_allclose(entry.embedding, cut, atol=TOLERANCE)


def test_base64_is_of_little_endian_floats(http: httpx.Client) -> None:
    (entry,) = post(http, "/v1/embeddings", input="crew", encoding_format="base64")["data"]
    (same,) = post(http, "/v1/embeddings", input="crew")["data"]
    decoded = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, same["embedding"], rtol=1e-6)


def test_conversations_are_embedded_as_their_template_renders_them(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "crew"}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    refused = http.post("/v1/embeddings", json={"messages": messages, "chat_template": template})
    assert "chat_template" in refused.json()["error"]["message"]  # the server does not permit it
    assert problem(http, "/v1/embeddings", messages=messages, input="x")[0] == 400


def test_pooling_has_the_vectors_of_embeddings(http: httpx.Client) -> None:
    (embedded,) = post(http, "/v1/embeddings", input="crew", dimensions=6)["data"]
    for path in ("/pooling", "/invocations"):
        pooled = post(http, path, input="crew", dimensions=6, task="embed")
        (entry,) = pooled["data"]
        assert (entry["object"], entry["data"]) == ("pooling", pytest.approx(embedded["embedding"]))
        assert pooled["usage"]["prompt_tokens"] > 0
    assert "embeds" in problem(http, "/pooling", input="crew", task="classify")[1]
    scored = post(http, "/invocations", queries="crew", documents=["crew", "fox"])
    assert scored["data"] == post(http, "/score", queries="crew", documents=["crew", "fox"])["data"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input: has 0 entries, must have 1 to 2048"),
        ({"input": ["a"] * 2049}, "input: has 2049 entries, must have 1 to 2048"),
        ({"input": ""}, "input: is empty, must have at least one token"),
        ({"input": [7, 99999]}, r"input\[1\]: is 99999, must be a token id"),
        ({"input": "a", "dimensions": 0}, "dimensions: is 0, must be from 1"),
        ({"input": "a", "dimensions": 65}, "dimensions: are 65, must be at most the model's 64"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (
            {"input": "a", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens: is 0, must be -1 or at least 1",
        ),
        ({"input": [5] * 600}, "input: has 600 tokens, must have at most"),
        ({}, "input: is missing"),
    ],
)
def test_invalid_bodies_are_refused_by_field(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    status, text = problem(http, "/v1/embeddings", **body)
    assert status == 400
    assert re.search(message, text), text


def test_embedder_refuses_to_generate_and_to_classify(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/classify", {"input": "a"}),
    ):
        status, text = problem(http, path, **body)
        assert status == 400
        assert "embeds prompts" in text


def test_rerank_by_embeddings_sorts_by_the_cosine(http: httpx.Client, vectors: list[np.ndarray]) -> None:
    scores = [float(vectors[0] @ vector) for vector in vectors[1:]]
    whole = post(http, "/v1/rerank", query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[2]}])
    order = sorted((0, 1), key=lambda index: -scores[index])
    assert [result["index"] for result in whole["results"]] == order
    for result in whole["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=TOLERANCE)
        assert result["document"] == {"text": TEXTS[1 + result["index"]]}
    best = post(http, "/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=1, return_documents=False)
    assert best["results"] == [
        {"index": order[0], "relevance_score": pytest.approx(scores[order[0]], abs=TOLERANCE)}
    ]
    lengths = [post(http, "/tokenize", prompt=text)["count"] for text in TEXTS]
    assert whole["usage"]["prompt_tokens"] == sum(lengths)


@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")])
def test_score_takes_the_names_of_each_release_of_vllm(
    http: httpx.Client, vectors: list[np.ndarray], names: tuple[str, str]
) -> None:
    body = {names[0]: TEXTS[0], names[1]: TEXTS[1:]}
    for path in ("/score", "/v1/score"):
        data = post(http, path, **body)["data"]
        assert [entry["index"] for entry in data] == [0, 1]
        for entry, vector in zip(data, vectors[1:], strict=True):
            assert entry["score"] == pytest.approx(float(vectors[0] @ vector), abs=TOLERANCE)
    assert problem(http, "/score", **{names[0]: ["a", "b"], names[1]: ["a"]}) == (
        400,
        "queries: has 2 texts for 1, must have 1 or as many",
    )


def test_classifier_scores_pairs_and_prompts(classifier: httpx.Client) -> None:
    (entry,) = post(classifier, "/classify", input="The quick brown foxA book")["data"]
    assert (entry["label"], entry["num_classes"]) == ("label-0", 1)
    score = post(classifier, "/score", text_1="The quick brown fox", text_2="A book")["data"][0]["score"]
    (ranked,) = post(classifier, "/rerank", query="The quick brown fox", documents=["A book"])["results"]
    assert ranked["relevance_score"] == pytest.approx(score)
    raw = post(classifier, "/score", text_1="The quick brown fox", text_2="A book", use_activation=False)
    assert 1 / (1 + np.exp(-raw["data"][0]["score"])) == pytest.approx(score, abs=1e-5)
    status, text = problem(classifier, "/v1/embeddings", input="a")
    assert status == 400
    assert "this endpoint is for a model that embeds" in text


def test_grpc_embed_returns_a_vector_per_prompt(server: ThreadedServer, vectors: list[np.ndarray]) -> None:
    prompts = [inference_pb2.EmbedPrompt(text=text) for text in TEXTS]
    with grpc.insecure_channel(server.server.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        response = stub.Embed(inference_pb2.EmbedRequest(prompts=prompts), timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Embed(inference_pb2.EmbedRequest(prompts=[inference_pb2.EmbedPrompt()]), timeout=60)
    for vector, expected in zip(response.vectors, vectors, strict=True):
        np.testing.assert_allclose(vector.values, expected, atol=TOLERANCE)
    assert response.model == "tiny"
    assert response.usage.prompt_tokens > len(TEXTS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
