"""Tool calls of GLM-4.5."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage


def argument(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("Hello <b>.", "Hello <b>.", []),
        ("<tool_call>now\n</tool_call>", None, [("now", "{}")]),
        (
            f"So:\n<tool_call>get_weather\n{argument('city', ' Paris ')}{argument('days', '3')}"
            f"{argument('places', '[1, 2.5]')}</tool_call>\n<tool_call>now</tool_call>",
            "So:",
            [("get_weather", '{"city": " Paris ", "days": 3, "places": [1, 2.5]}'), ("now", "{}")],
        ),
        (
            f"<tool_call>get_weather{argument('days', '1e999')}{argument('options', '{1: (2, 3)}')}</tool_call>!",
            "!",
            [("get_weather", '{"days": "1e999", "options": {"1": [2, 3]}}')],
        ),
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>Pa",
            None,
            [("get_weather", '{"city": "Pa')],
        ),
        ("<tool_call>get_weather\n<arg_key>ci</tool_call>.", ".", [("get_weather", "{}")]),
        ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
    ],
)
def test_glm45_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "glm45") == AssistantMessage(content, None, calls(*expected))
