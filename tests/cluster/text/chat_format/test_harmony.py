"""Harmony, the format of gpt-oss."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage

THINK = "<|channel|>analysis<|message|>They ask.\n\nSo.<|end|>"
NEXT = "<|start|>assistant"
FINAL = f"{NEXT}<|channel|>final<|message|>Yes."


def call(header: str, arguments: str) -> str:
    return f"{NEXT}{header}<|message|>{arguments}"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "expected"),
    [
        (THINK + FINAL, "They ask.\n\nSo.", "Yes.", []),
        ("<|channel|>final<|message|>Yes.", None, "Yes.", []),
        (
            THINK + call("<|channel|>commentary to=functions.get_weather <|constrain|>json", '{"city": "a"}'),
            "They ask.\n\nSo.",
            None,
            [("get_weather", '{"city": "a"}')],
        ),
        # The recipient may come before the channel; several calls.
        (
            THINK
            + call(" to=functions.now<|channel|>commentary", "{}<|call|>")
            + call("<|channel|>commentary to=functions.get_weather", '{"days": <|call|>'),
            "They ask.\n\nSo.",
            None,
            [("now", "{}"), ("get_weather", '{"days": null }')],
        ),
        # A preamble is for the user.
        (
            f"<|channel|>commentary<|message|>I look it up.<|end|>{call(' to=functions.now', '{}')}",
            None,
            "I look it up.",
            [("now", "{}")],
        ),
        ("<|channel|>analysis<|message|>They a", "They a", None, []),
        ("<|channel|>analysis to=python<|message|>1 + 1", "1 + 1", None, []),
        ("No header <|x|>.", None, "No header <|x|>.", []),
        ("assistant is a word", None, "assistant is a word", []),
    ],
)
def test_harmony_text_is_parsed(
    text: str, reasoning: str | None, content: str | None, expected: list[tuple[str, str]]
) -> None:
    expected_message = AssistantMessage(content, reasoning, calls(*expected))
    assert parse_all_ways(text, "openai") == expected_message
    assert parse_all_ways(text, "openai", "openai_gptoss") == expected_message


def test_harmony_reasoning_is_parsed_without_tools() -> None:
    assert parse_all_ways(THINK + FINAL, "none", "openai_gptoss") == AssistantMessage(
        "Yes.", "They ask.\n\nSo."
    )
