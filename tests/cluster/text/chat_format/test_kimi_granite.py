"""Tool calls of Kimi K2 and of Granite."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage, ToolCall

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def test_kimi_k2_calls_keep_the_ids_of_the_model() -> None:
    first = f'{CALL}functions.get_weather:0{ARGUMENTS}{{"city": "a"}}{END_CALL}'
    second = f"{CALL} functions.now:1 {ARGUMENTS}{END_CALL}"
    message = parse_all_ways(f"Hm.\n{BEGIN}{first}\n{second}{END} Done.", "kimi_k2")
    assert message == AssistantMessage(
        "Hm.Done.",
        None,
        (
            ToolCall("functions.get_weather:0", "get_weather", '{"city": "a"}'),
            ToolCall("functions.now:1", "now", "{}"),
        ),
    )


@pytest.mark.parametrize(
    "text", [f"{BEGIN}{CALL}functions.now:0", f"{BEGIN}x", f"{BEGIN}{CALL}{ARGUMENTS}{{}}"]
)
def test_kimi_k2_without_a_call_is_content(text: str) -> None:
    assert parse_all_ways(text, "kimi_k2") == AssistantMessage(text)


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (
            '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]',
            None,
            [("now", "{}"), ("now", '{"a": 1}')],
        ),
        ('<tool_call>[{"arguments": {"a": 1}, "name": "now"}]</tool_call> Ok', "Ok", [("now", '{"a": 1}')]),
        ("<|tool_call|>nothing", "<|tool_call|>nothing", []),
    ],
)
def test_granite_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "granite") == AssistantMessage(content, None, calls(*expected))
