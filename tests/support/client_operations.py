"""Operations that tests/clients runs with each client library.

A client runs in a process of its own, in its own environment, without quire: `python CLIENT.py URL OPERATION` prints
the operation's result as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Protocol

MODEL = "tiny"
QUESTION = "When?"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "Return the time.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TOOL_CALL_ID = "call-1"
TOOL_RESULT = "12:00"

# The text, then the name and the arguments of each tool call.
TextAndCalls = tuple[str, list[tuple[str, dict[str, Any]]]]


class Client(Protocol):
    def chat(self) -> tuple[str, int]:
        """Return the text of an answer to QUESTION and the number of its tokens."""

    def stream(self) -> list[str]:
        """Return the texts of the answer's chunks that have one."""

    def tools(self) -> TextAndCalls:
        """Return the answer to QUESTION and TOOL."""

    def streamed_tools(self) -> TextAndCalls:
        """Return the answer to QUESTION and TOOL, put together from a stream."""

    def tool_result(self) -> str:
        """Return the answer to QUESTION, a tool call without text and TOOL_RESULT."""

    def unknown_model(self) -> str:
        """Return the name of the exception that a request for another model raises."""


def run(make_client: Callable[[str], Client]) -> None:
    """Run the operation of the command line.

    Args:
        make_client: its argument is the URL of the OpenAI API, with /v1.
    """
    url, operation = sys.argv[1:]
    print(json.dumps(getattr(make_client(url), operation)()))
