"""Tool calls of Llama's models, as JSON and as Python."""

from __future__ import annotations

import json

import pytest
from chat_outputs import calls, parse, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("Hello.", "Hello.", []),
        (
            '{"name": "get_weather", "parameters": {"city": "Paris"}}',
            None,
            [("get_weather", '{"city": "Paris"}')],
        ),
        (
            '<|python_tag|>{"type": "function", "name": "other", "parameters": {}}; '
            '{"name": "now", "parameters": {}}',
            None,
            [("other", "{}"), ("now", "{}")],
        ),
        (
            '<|python_start|>{"name": "now", "parameters": {"a": 1}}<|python_end|>',
            None,
            [("now", '{"a": 1}')],
        ),
        ('{"name": "now", "parameters": {}} That was it.', "That was it.", [("now", "{}")]),
        ('{"name": "now", "parameters": {"a": ', None, [("now", '{"a":')]),
        # JSON that is no call of an offered function is content.
        ('{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
        ('{"answer": "now"}', '{"answer": "now"}', []),
        ('<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ],
)
def test_llama3_json_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "llama3_json") == AssistantMessage(content, None, calls(*expected))


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("Hello.", "Hello.", []),
        ("[now()]", None, [("now", "{}")]),
        (
            '[get_weather(city="Pa)r, is\\"", days=3, exact=True), now()]',
            None,
            [("get_weather", '{"city": "Pa)r, is\\"", "days": 3, "exact": true}'), ("now", "{}")],
        ),
        (
            "<|python_start|>[get_weather(places=['a', \"b'\"], options={'x': [1, (2,)], 'y': None})]<|python_end|>",
            None,
            [("get_weather", '{"places": ["a", "b\'"], "options": {"x": [1, [2]], "y": null}}')],
        ),
        # JSON's names, and text that is no literal.
        (
            "[get_weather(exact=false, days=null, city=Paris)]",
            None,
            [("get_weather", '{"exact": false, "days": null, "city": "Paris"}')],
        ),
        ("[get_weather(1, city='x')] So.", "So.", [("get_weather", '{"city": "x"}')]),
        ("[get_weather(city='Par", None, [("get_weather", "")]),
        ("[get_weather(days=1, city='Par", None, [("get_weather", '{"days": 1')]),
        ("[other(x=1)]", "[other(x=1)]", []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[now", "[now", []),
    ],
)
def test_pythonic_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "pythonic") == AssistantMessage(content, None, calls(*expected))


@pytest.mark.parametrize(
    "value", ["[" * 5000 + "]" * 5000, "1" * 5000, "1e999", "'\\ud800'", "{1, 2}", "b'x'"]
)
def test_pythonic_value_that_json_lacks_is_text(value: str) -> None:
    (call,) = parse([f"[get_weather(city={value})]"], "pythonic")[1].tool_calls
    assert isinstance(json.loads(call.arguments)["city"], str)
    call.arguments.encode()
