"""Tool calls of Hermes and Qwen."""

from __future__ import annotations

import pytest
from chat_outputs import calls, parse, parse_all_ways

from quire.cluster.text.chat_format.deltas import (
    AssistantMessage,
    ContentDelta,
    ToolCallArguments,
    ToolCallStart,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("Hello there.\n", "Hello there.\n", []),
        (
            f'{OPEN}\n{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}\n{CLOSE}',
            None,
            [("get_weather", '{"city": "Paris"}')],
        ),
        (
            f'Let me see.\n{OPEN}{{"name": "now", "arguments": {{}}}}{CLOSE}\n'
            f'{OPEN}{{"name": "now", "arguments": {{"a": [1, {{"b": null}}]}}}}{CLOSE}\n',
            "Let me see.",
            [("now", "{}"), ("now", '{"a": [1, {"b": null}]}')],
        ),
        # A string may hold brackets, quotes and text that looks like the end of an object.
        (
            rf'{OPEN}{{"name": "now", "arguments": {{"a": "}}}} \"]\\", "b": "ÿ💡\u00e9"}}}}{CLOSE}',
            None,
            [("now", r'{"a": "}} \"]\\", "b": "ÿ💡\u00e9"}')],
        ),
        # Arguments before the name, other members, no arguments.
        (f'{OPEN}{{"arguments": {{"a": 1}}, "name": "now"}}{CLOSE}', None, [("now", '{"a": 1}')]),
        (
            f'{OPEN}{{"type": "f", "name": "now", "x": [1], "parameters": {{"a": 1}}, "y": 2}}{CLOSE}',
            None,
            [("now", '{"a": 1}')],
        ),
        (f'{OPEN}{{"name": "now"}}{CLOSE}.', ".", [("now", "{}")]),
        # Invalid arguments are mended; the closing tag ends the call wherever it comes.
        (f'{OPEN}{{"name": "now", "arguments": {{"a": oops]}}{CLOSE}', None, [("now", '{"a": "oops"}')]),
        (f'{OPEN}{{"name": "now", "arguments": {{"a": "b{CLOSE} c', "c", [("now", '{"a": "b"}')]),
        # The length ended the text.
        (f'{OPEN}{{"name": "now", "arguments": {{"a": 1', None, [("now", '{"a": 1')]),
        (f'{OPEN}{{"name": "no', f'{OPEN}{{"name": "no', []),
        # No call follows the tag.
        (f"The tag \n{OPEN} is odd.", f"The tag \n{OPEN} is odd.", []),
        (f'{OPEN}{{"name": 5}}{CLOSE}', f'{OPEN}{{"name": 5}}{CLOSE}', []),
        (f'{OPEN}{{"name": "\\ud800"}}{CLOSE}', f'{OPEN}{{"name": "\\ud800"}}{CLOSE}', []),
        (f'{OPEN}{{"name": "{"x" * 2000}"}}{CLOSE}', f'{OPEN}{{"name": "{"x" * 2000}"}}{CLOSE}', []),
    ],
)
def test_hermes_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "hermes") == AssistantMessage(content, None, calls(*expected))


def test_hermes_streams_arguments_as_they_come() -> None:
    pieces = ["Hm.", OPEN, '{"name": "now", ', '"arguments": {"a', '": 1', "2}", "}" + CLOSE]
    deltas, _ = parse(pieces, "hermes")
    assert deltas == [
        ContentDelta("Hm."),
        ToolCallStart(0, "call-0", "now"),
        ToolCallArguments(0, '{"a": 12}'),
    ]


def test_hermes_leaves_out_calls_after_the_first_if_they_must_not_be_parallel() -> None:
    text = f'{OPEN}{{"name": "now"}}{CLOSE}{OPEN}{{"name": "get_weather"}}{CLOSE}'
    message = parse_all_ways(text, "hermes", allows_parallel_calls=False)
    assert message.tool_calls == calls(("now", "{}"))
