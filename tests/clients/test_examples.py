"""The examples that need the environment of a client library."""

from __future__ import annotations

from local_server import ThreadedServer

from tests.clients.conftest import ROOT, RunProgram

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12.5, "b": 8}}</tool_call>'
ANSWER = "It is 100."
END = 0  # the end of sequence


def test_langchain_agent_runs_a_tool_and_answers(server: ThreadedServer, run_program: RunProgram) -> None:
    server.wait_until_free()
    encode = server.server.tokenizer.encode
    call, newline, answer = (encode(text, add_special_tokens=False) for text in (CALL, "\n", ANSWER))
    # A step in flight when the call ends takes a token whose result is dropped: a newline, which is not missed.
    server.server.script.write([*call, END, *newline, *newline, *answer])
    example = ROOT / "examples" / "langchain_agent.py"
    printed = run_program("langchain", "python", example, f"{server.url}/v1", "tiny")
    lines = [line for line in printed.splitlines() if line.strip()]
    assert lines == ["multiply({'a': 12.5, 'b': 8}) -> 100.0", ANSWER]
