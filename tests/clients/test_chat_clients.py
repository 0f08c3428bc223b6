"""Chat, streams and tools with client libraries of others, each in its own process and environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_model import write_output
from local_server import ThreadedServer

from tests.clients.conftest import FOLDER, RunProgram

# environment |-> the command that runs an operation
CLIENTS = {
    "openai_js": ("node", FOLDER / "openai_client.mjs"),
    "langchain": ("python", FOLDER / "langchain_client.py"),
    "llama_index": ("python", FOLDER / "llama_index_client.py"),
    "litellm": ("python", FOLDER / "litellm_client.py"),
}
TEXT = "At noon, the ships sail."
REPLY = '<think>Hm.</think>I ask.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
TEXT_AND_CALLS = ["I ask.", [["now", {"a": 1}]]]

RunOperation = Callable[[str], Any]


@pytest.fixture(params=CLIENTS)
def run(request: pytest.FixtureRequest, server: ThreadedServer, run_program: RunProgram) -> RunOperation:
    """Run an operation with one client and return its result; see client_operations.py."""

    def run_operation(operation: str) -> Any:
        command = CLIENTS[request.param]
        output = run_program(request.param, *command, f"{server.url}/v1", operation)
        return json.loads(output.splitlines()[-1])

    return run_operation


def test_chat_has_text_and_usage(run: RunOperation, server: ThreadedServer) -> None:
    write_output(server, TEXT)
    num_tokens = len(server.server.tokenizer.encode(TEXT, add_special_tokens=False))
    assert run("chat") == [TEXT, num_tokens + 1]  # the end of sequence is a token too


def test_stream_adds_up_to_the_text(run: RunOperation, server: ThreadedServer) -> None:
    write_output(server, TEXT)
    texts = run("stream")
    assert "".join(texts) == TEXT
    assert len(texts) > 1


def test_tool_call(run: RunOperation, server: ThreadedServer) -> None:
    write_output(server, REPLY)
    assert run("tools") == TEXT_AND_CALLS


def test_streamed_tool_call(run: RunOperation, server: ThreadedServer) -> None:
    write_output(server, REPLY)
    assert run("streamed_tools") == TEXT_AND_CALLS


def test_tool_result_is_answered(run: RunOperation, server: ThreadedServer) -> None:
    write_output(server, TEXT)
    assert run("tool_result") == TEXT


def test_unknown_model_is_not_found(run: RunOperation) -> None:
    assert run("unknown_model").endswith("NotFoundError")
