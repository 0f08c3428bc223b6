"""MiniMax M3's calls, whose arguments are nested elements."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_outputs import parse, parse_all_ways

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "tags": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        "odd": {"type": "object", "properties": {"item": {"type": "string"}}},
        "text": {"type": "string"},
        "more": {},
    },
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "at": {"type": "array", "items": {"type": "number"}}},
        }
    },
}


def call(arguments: str, end: str = "</invoke>\n</tool_call>") -> str:
    return f'<tool_call>\n<invoke name="f">{arguments}{end}'.replace("<", "]<]minimax[>[<")


def read(text: str) -> Any:
    message = parse_all_ways(text, "minimax_m3", num_random=5, tools={"f": SCHEMA})
    (found,) = message.tool_calls
    return json.loads(found.arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("<days><item>1</item><item>2</item></days>", {"days": [1, 2]}),
        ("<days><item>1</item></days>", {"days": [1]}),
        ("<days></days><odd></odd><text></text>", {"days": [], "odd": {}, "text": ""}),
        (
            "<tags><item><item>1</item></item><item><item>a</item><item>b</item></item></tags>",
            {"tags": [["1"], ["a", "b"]]},
        ),
        ("<odd><item>1</item></odd>", {"odd": {"item": "1"}}),
        (
            "<place>\n<name>12</name>\n<at><item>1.5</item><item>2</item></at>\n</place>",
            {"place": {"name": "12", "at": [1.5, 2]}},
        ),
        ("<more><a>1</a><a>2</a><b>x</b></more>", {"more": {"a": ["1", "2"], "b": "x"}}),
        ("<other>7</other><more>7</more>", {"other": "7", "more": 7}),
    ],
)
def test_elements_are_values_of_the_schema(arguments: str, expected: Any) -> None:
    assert read(call(arguments)) == expected


def test_text_that_looks_like_a_tag_is_text() -> None:
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>{mark}<invoke name="f">{mark}<text>if (a<b) </text> ]<]{mark}</text>{mark}</invoke>'
    assert read(text) == {"text": "if (a<b) </text> ]<]"}


@pytest.mark.parametrize("end", ["</invoke>\n</tool_call>", "</tool_call>"])
def test_the_end_of_a_call_ends_its_elements(end: str) -> None:
    assert read(call("<place><name>x", end)) == {"place": {"name": "x"}}


def test_nesting_has_a_limit() -> None:
    depth = 5000
    _, message = parse([call("<a>" * depth + "1" + "</a>" * depth)], "minimax_m3", tools={"f": SCHEMA})
    (found,) = message.tool_calls
    assert list(json.loads(found.arguments)) == ["a"]
