"""Tool calls of Mistral's models."""

from __future__ import annotations

import pytest
from chat_outputs import TOOLS, calls, parse_all_ways

from quire.cluster.text.chat_format.chat_format import ChatFormat
from quire.cluster.text.chat_format.deltas import AssistantMessage, ToolCall

M = "[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("Hello [TOOL].", "Hello [TOOL].", []),
        (
            f'{M} [{{"name": "now", "arguments": {{}}}}, {{"name": "get_weather", "arguments": {{"city": "]"}}}}]',
            None,
            [("now", "{}"), ("get_weather", '{"city": "]"}')],
        ),
        (f'{M}{{"name": "now", "arguments": {{"a": 1}}}}', None, [("now", '{"a": 1}')]),
        (f'Hm.{M}now{{"a": 1}}{M}get_weather{{}}', "Hm.", [("now", '{"a": 1}'), ("get_weather", "{}")]),
        (f'{M}now[ARGS]{{"a": "{{"}}{M}now[ARGS]', None, [("now", '{"a": "{"}'), ("now", "{}")]),
        (f'{M}now[ARGS]{{"a": "b', None, [("now", '{"a": "b')]),
        (f'{M}[{{"name": "now", "arguments": {{"a": 1', None, [("now", '{"a": 1')]),
        (f"{M} no call here", f"{M} no call here", []),
    ],
)
def test_mistral_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "mistral") == AssistantMessage(content, None, calls(*expected))


def test_mistral_id_of_the_model_is_kept() -> None:
    message = parse_all_ways(f"{M}now[CALL_ID]abc123def[ARGS]{{}}", "mistral")
    assert message.tool_calls == (ToolCall("abc123def", "now", "{}"),)


def test_mistral_id_has_nine_letters_and_digits() -> None:
    parser = ChatFormat.find("mistral", "none", None).parser("", TOOLS)
    parser.push(f"{M}now{{}}")
    parser.finish()
    (call,) = parser.message.tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()
