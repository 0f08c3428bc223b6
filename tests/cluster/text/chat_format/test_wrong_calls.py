"""Calls that models write otherwise than their format has it."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage, ToolCall

NOW = '{"name": "now", "arguments": {}}'
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"
ONE = [("now", "{}")]


@pytest.mark.parametrize(
    ("name", "text", "content", "expected"),
    [
        # Calls anywhere in the text, beside brackets that are none.
        (
            "llama3_json",
            'Sure: {"name": "now", "parameters": {}}\n{"x": {"y": 1}} {"name": "Bob"}',
            'Sure:{"x": {"y": 1}} {"name": "Bob"}',
            ONE,
        ),
        ("pythonic", "I call [now()] for [1, 2] and [other()].", "I callfor [1, 2] and [other()].", ONE),
        ("xlam", f"So:\n```json\n[{NOW}]\n```", "So:", ONE),
        # Several calls in one tag, and as a list.
        ("hermes", f"<tool_call>{NOW}\n{NOW}</tool_call>Ok", "Ok", ONE * 2),
        ("hermes", f"<tool_call>[{NOW}, {NOW}]</tool_call>Ok", "Ok", ONE * 2),
        (
            "qwen3_coder",
            "<tool_call><function=now></function><function=now></function></tool_call>",
            None,
            ONE * 2,
        ),
        ("glm45", "<tool_call>now\n<tool_call>now</tool_call>", "<tool_call>now", ONE),
        # A bracket too many, a closing tag too few.
        ("hermes", f"<tool_call>{NOW}}}</tool_call>Ok", "Ok", ONE),
        ("hermes", f"<tool_call>{NOW}\n<tool_call>{NOW}</tool_call>Ok", "Ok", ONE * 2),
        # Arguments that are encoded twice, or that are no object.
        (
            "hermes",
            r'<tool_call>{"name": "now", "arguments": "{\"a\": [1]}"}</tool_call>',
            None,
            [("now", '{"a": [1]}')],
        ),
        (
            "hermes",
            r'<tool_call>{"arguments": "{\"a\": 1}", "name": "now"}</tool_call>',
            None,
            [("now", '{"a": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, ONE),
        ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>', None, ONE),
        # Arguments that are no JSON.
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {\'a\': True, b: [1 2,], "c": "\n"}}</tool_call>',
            None,
            [("now", '{"a": true, "b": [1, 2], "c": "\\n"}')],
        ),
        ("pythonic", "[now(x=1])]", None, [("now", '{"x": "1]"}')]),
        # Empty sections, and text before a section's first call.
        ("kimi_k2", f"Hm.{BEGIN}{END}Ok", "Hm.Ok", []),
        ("hunyuan_a13b", "<tool_calls>[]</tool_calls>Ok", "Ok", []),
        ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>Ok", "Ok", []),
        ("kimi_k2", f"{BEGIN}I look.{KIMI}{END}", None, ONE),
        ("mistral", f"[TOOL_CALLS] calls: [{NOW}]", None, ONE),
        ("mistral", f"[TOOL_CALLS] [{NOW}]\n\nOk", "Ok", ONE),
        # Names without the end of their tag.
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather\n<parameter=city\nOslo\n</parameter>\n</function>\n</tool_call>",
            None,
            [("get_weather", '{"city": "Oslo"}')],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather\n>\n<parameter=city>\nOslo\n</parameter>\n</function></tool_call>",
            None,
            [("get_weather", '{"city": "Oslo"}')],
        ),
    ],
)
def test_calls_are_read(name: str, text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, name) == AssistantMessage(content, None, calls(*expected))


def test_kimi_k2_ids_without_a_number_are_replaced() -> None:
    message = parse_all_ways(f"{BEGIN}{KIMI}{KIMI.replace('>now<', '>functions.now:3<')}{END}", "kimi_k2")
    assert message.tool_calls == (ToolCall("call-0", "now", "{}"), ToolCall("functions.now:3", "now", "{}"))


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "expected"),
    [
        (f"<think>I look.\n<tool_call>{NOW}</tool_call>", "I look.", None, ONE),
        (f"<think>I look.\n<tool_call>{NOW}</tool_call>\nDone.", "I look.", "Done.", ONE),
        # The tag alone is no call.
        (f"<think>A <tool_call> too.\n</think><tool_call>{NOW}</tool_call>", "A <tool_call> too.", None, ONE),
    ],
)
def test_a_call_ends_reasoning_that_is_not_closed(
    text: str, reasoning: str, content: str | None, expected: list[tuple[str, str]]
) -> None:
    assert parse_all_ways(text, "hermes", "qwen3") == AssistantMessage(content, reasoning, calls(*expected))
