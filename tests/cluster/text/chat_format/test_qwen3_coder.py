"""Tool calls of Qwen3-Coder."""

from __future__ import annotations

import json

import pytest
from chat_outputs import calls, parse, parse_all_ways

from quire.cluster.text.chat_format.deltas import AssistantMessage, ToolCallArguments

CALL = """<tool_call>
<function=get_weather>
<parameter=city>
Paris "x" \\
 é
</parameter>
<parameter=days>
3
</parameter>
<parameter=exact>
True
</parameter>
<parameter=places>
["a", 'b']
</parameter>
<parameter=options>
{"deep": {"n": null}}
</parameter>
</function>
</tool_call>"""


def test_qwen3_coder_values_get_the_types_of_the_schema() -> None:
    message = parse_all_ways(f"I look.\n{CALL}\n", "qwen3_coder")
    assert message.content == "I look."
    (call,) = message.tool_calls
    assert json.loads(call.arguments) == {
        "city": 'Paris "x" \\\n é',
        "days": 3,
        "exact": True,
        "places": ["a", "b"],
        "options": {"deep": {"n": None}},
    }


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (
            "<tool_call><function=now></function></tool_call>\n\n<tool_call><function=now></function></tool_call>",
            None,
            [("now", "{}"), ("now", "{}")],
        ),
        # Without the tags around it, as some models write; a parameter that the schema lacks is a string.
        ("Hm <function=now><parameter=x>1</parameter></function>.", "Hm.", [("now", '{"x": "1"}')]),
        # Values that are not of their types become strings.
        (
            "<tool_call><function=get_weather><parameter=days>soon</parameter>"
            "<parameter=exact>NaN</parameter></function></tool_call>",
            None,
            [("get_weather", '{"days": "soon", "exact": "NaN"}')],
        ),
        # Closing tags are missing.
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n<parameter=days>\n2\n</tool_call>",
            None,
            [("get_weather", '{"city": "A", "days": 2}')],
        ),
        # The length ended the text: the arguments stay incomplete.
        (
            "<tool_call><function=get_weather><parameter=city>Par",
            None,
            [("get_weather", '{"city": "Par')],
        ),
        ("<tool_call><function=get_weather><parameter=days>1", None, [("get_weather", '{"days": ')]),
        ("<tool_call> <b>", "<tool_call> <b>", []),
        ("<tool_call><function=", "<tool_call><function=", []),
        (f"<function={'x' * 3000}>", f"<function={'x' * 3000}>", []),
    ],
)
def test_qwen3_coder_text_is_parsed(text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse_all_ways(text, "qwen3_coder") == AssistantMessage(content, None, calls(*expected))


def test_qwen3_coder_streams_strings_as_they_come() -> None:
    opening = "<tool_call><function=get_weather><parameter=city>"
    pieces = [opening, "Par", "is\n", "x", "</parameter></function></tool_call>"]
    deltas = [parse(pieces[:count], "qwen3_coder")[0][1:] for count in range(1, 6)]
    texts = [arguments.text for (arguments,) in deltas if isinstance(arguments, ToolCallArguments)]
    assert texts == [
        '{"city": "',
        '{"city": "Par',
        '{"city": "Paris\\n',
        '{"city": "Paris\\nx',
        '{"city": "Paris\\nx"}',
    ]
