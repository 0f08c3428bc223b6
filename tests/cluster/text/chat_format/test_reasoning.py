"""Reasoning between tags."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage

OPENED, CLOSED = "user\nassistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nOne\n\ntwo.\n</think>\n\nYes.\n", "One\n\ntwo.", "Yes.\n"),
        ("qwen3", "", "\n<think></think>Yes.", None, "Yes."),
        ("qwen3", "", "Yes <think>no</think>", None, "Yes <think>no</think>"),
        ("qwen3", OPENED, "One.\n</think>\n\nYes.", "One.", "Yes."),
        ("qwen3", OPENED, "<think>One.\n</think>\n\nYes.", "One.", "Yes."),
        ("qwen3", OPENED, "One, and the length ended it", "One, and the length ended it", None),
        ("qwen3", CLOSED, "Yes </think>.", None, "Yes </think>."),
        ("deepseek_r1", "", "One.</think>Yes.", "One.", "Yes."),
        ("deepseek_r1", "", "<think>One.</think>Yes.", "One.", "Yes."),
        ("deepseek_r1", CLOSED, "Yes.", None, "Yes."),
        ("mistral", "", "[THINK]One.[/THINK]Yes.", "One.", "Yes."),
        (
            "granite",
            "",
            "Here is my thought process:\nOne.\nHere is my response:\nYes.",
            "One.",
            "Yes.",
        ),
        ("granite", "", "Here's my thought process: One. Here's my response: Yes.", " One. ", " Yes."),
        ("granite", "", "Here is my dog.", None, "Here is my dog."),
    ],
)
def test_reasoning_is_set_apart(
    name: str, prompt: str, text: str, reasoning: str | None, content: str | None
) -> None:
    assert parse_all_ways(text, "none", name, prompt=prompt) == AssistantMessage(content, reasoning)


def test_tool_call_follows_reasoning() -> None:
    text = '<think>\nThey ask <tool_call>.\n</think>\n\n<tool_call>{"name": "now"}</tool_call>'
    message = parse_all_ways(text, "hermes", "qwen3")
    assert message == AssistantMessage(None, "They ask <tool_call>.", calls(("now", "{}")))
