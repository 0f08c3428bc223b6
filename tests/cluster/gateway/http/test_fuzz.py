"""Every field of every endpoint with any value: an answer or a clear error, nothing left behind, quiet logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_model import PARSERS, chat_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_server import ThreadedServer, threaded_server

from quire.cluster.gateway.http.endpoints.operation import LoadLoraAdapter, UnloadLoraAdapter, UpdateWeights
from quire.cluster.gateway.http.endpoints.tokenization import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.cluster.gateway.http.schema.anthropic_message import CountTokensRequest, MessagesRequest
from quire.cluster.gateway.http.schema.chat_completion import ChatCompletionRequest
from quire.cluster.gateway.http.schema.completion import CompletionRequest
from quire.cluster.gateway.http.schema.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.cluster.gateway.http.schema.request_model import RequestModel
from quire.cluster.gateway.http.schema.response_request import ResponseRequest
from quire.proto.structured_outputs import KINDS, RepetitionDetectionParams

USER = {"role": "user", "content": "When?"}
NUM_EXAMPLES = 20

# path |-> its body and a small valid one
ENDPOINTS: dict[str, tuple[type[RequestModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [USER], "max_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"messages": [USER], "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [USER]}),
    "/v1/responses": (ResponseRequest, {"input": "x", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (ResponseRequest, {"input": "x"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "x"}),
    "/pooling": (PoolingRequest, {"input": "x"}),
    "/invocations": (CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    "/score": (ScoreRequest, {"queries": "x", "documents": ["y"]}),
    "/rerank": (RerankRequest, {"query": "x", "documents": ["y"]}),
    "/v1/load_lora_adapter": (LoadLoraAdapter, {"lora_name": "x", "lora_path": "/x"}),
    "/v1/unload_lora_adapter": (UnloadLoraAdapter, {"lora_name": "x"}),
    "/update_weights": (UpdateWeights, {"path": "/x", "version": "x"}),
    "/apply-template": (ApplyTemplateRequest, {"messages": [USER]}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
# They answer only if an operator does what no fuzzer does by chance.
REFUSE_ALL = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights"}
ALLOWED = {200, 400, 404, 409, 413, 422, 429, 503}

NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 20, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1.5, 1e308, -0.0])
TEXTS = st.sampled_from(
    ["", "x", "user", "text", "auto", "\x00", "\ud800", "é", "qwen", "9", "<think>", "tool"]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "parameters", "tool_calls", "id", "input", "1", "x",
     "include_usage", "json_schema", "tool_use_id", "input_schema", "arguments", "thinking", "budget_tokens"]
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", ""]), "content": JSON},
    optional={"tool_calls": JSON, "tool_call_id": JSON, "reasoning_content": JSON, "name": JSON},
)
# Values that get past the first check of a field of this name.
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, max_size=3),
    "tools": st.lists(st.fixed_dictionaries({"type": TEXTS, "name": TEXTS, "function": JSON}), max_size=2),
    "prompt": st.lists(st.integers(-1, 400), max_size=5) | st.lists(TEXTS, max_size=3),
    "tokens": st.lists(st.integers(-1, 400), max_size=5),
    "input": st.lists(
        MESSAGE
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "x"])},
            optional={
                "role": TEXTS,
                "content": JSON,
                "call_id": JSON,
                "name": JSON,
                "arguments": JSON,
                "output": JSON,
            },
        ),
        max_size=3,
    ),
    "documents": st.lists(TEXTS | st.dictionaries(KEYS, TEXTS), max_size=3),
    "structured_outputs": st.dictionaries(st.sampled_from([*KINDS, "x"]), JSON, min_size=2, max_size=3),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_schema", "x"])}, optional={"json_schema": NUMBERS | TEXTS}
    ),
    "tool_choice": st.fixed_dictionaries({"type": TEXTS}, optional={"name": JSON, "function": JSON}),
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "x"]), "budget_tokens": JSON}),
    "repetition_detection": st.dictionaries(
        st.sampled_from(RepetitionDetectionParams._fields), NUMBERS, min_size=1
    ),
    "vllm_xargs": st.dictionaries(TEXTS, JSON, max_size=2),
    "stop": st.lists(TEXTS, max_size=3),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "x", "-1", "99999"]), NUMBERS, max_size=2),
    "stream_options": st.fixed_dictionaries({"include_usage": JSON, "continuous_usage_stats": JSON}),
}


@pytest.fixture(scope="module")
def server(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedServer]:
    model = chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))
    options = {"runner": "both", "enable_lora": True, "max_model_len": 96, "num_kv_blocks": 128}
    allowed = {"allows_lora_updates": True, "allows_engine_control": True}
    with threaded_server(model, **options, **allowed, **PARSERS) as server:
        yield server


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    model, valid = ENDPOINTS[path]
    names = draw(st.lists(st.sampled_from(sorted(model.model_fields)), min_size=1, max_size=4, unique=True))
    return valid | {name: draw(PLAUSIBLE.get(name, JSON) | JSON) for name in names}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_any_body_gets_an_answer_or_a_clear_error(
    server: ThreadedServer, http: httpx.Client, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    statuses = {http.post(path, json=ENDPOINTS[path][1]).status_code}

    @settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(bodies(path))
    def check(body: dict[str, Any]) -> None:
        # The json module writes lone surrogates, which httpx does not.
        answered = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        statuses.add(answered.status_code)
        assert answered.status_code in ALLOWED, (body, answered.text)
        if answered.status_code != 200:
            assert answered.json()["error"]["message"], body
            assert "Traceback" not in answered.text

    check()
    assert {200, 400} - ({200} if path in REFUSE_ALL else set()) <= statuses
    # Adapters that operators name and that cannot be read are for the log.
    assert not [record for record in caplog.records if "cannot be loaded" not in record.getMessage()]


# All endpoints read their bodies in the same way, and have one of two forms of errors.
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/score", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b"NaN",
    ],
    ids=["empty", "open", "list", "null", "text", "bytes", "deep-list", "deep-object", "digits", "nan"],
)
def test_bodies_that_are_no_json_objects_are_refused(http: httpx.Client, path: str, content: bytes) -> None:
    answered = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answered.status_code == 400, answered.text
    assert answered.json()["error"]["message"]
