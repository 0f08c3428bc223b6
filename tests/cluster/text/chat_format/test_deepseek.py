"""Tool calls of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CITY, DAYS = '{"city": "```"}', '{"days": [1, {}]}'


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{END_CALL}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{END_CALL}"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("Hello.", "Hello.", []),
        (
            f"Look:\n{BEGIN}{v3('now', '{}')}\n{v3('get_weather', CITY)}{END}",
            "Look:",
            [("now", "{}"), ("get_weather", CITY)],
        ),
        (f"{BEGIN}{CALL}function{SEP}now\n```json\n{{oops", None, [("now", "{")]),
        (f"{BEGIN}{CALL}function{SEP}no", f"{BEGIN}{CALL}function{SEP}no", []),
        (f"{BEGIN} nothing", f"{BEGIN} nothing", []),
    ],
)
def test_deepseek_v3_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "deepseek_v3") == AssistantMessage(content, None, calls(*expected))


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (
            f"Look:\n{BEGIN}{v31('now', '')}{v31('get_weather', DAYS)}{END}Done.",
            "Look:Done.",
            [("now", "{}"), ("get_weather", DAYS)],
        ),
        (f"{BEGIN}{v31('now', '{bad')}{END}", None, [("now", '{"bad": null}')]),
        (f"{BEGIN}{CALL}now{SEP}" + '{"a": "', None, [("now", '{"a": "')]),
        (f"{BEGIN}{CALL}{SEP}{{}}", f"{BEGIN}{CALL}{SEP}{{}}", []),
    ],
)
def test_deepseek_v31_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "deepseek_v31") == AssistantMessage(content, None, calls(*expected))
