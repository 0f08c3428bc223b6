"""Arguments that are written as text get the values that the tool's schema means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.cluster.text.chat_format.chat_format import ChatFormat
from quire.cluster.text.chat_format.deltas import collect_message

REFERRED = {"Point": {"type": "object"}, "Name": {"enum": ["42", "b"]}}


def value(text: str, schema: Any, name: str = "qwen3_coder") -> Any:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": REFERRED}
    parser = ChatFormat.find(name, "none", None).parser("", {"f": parameters})
    written = {
        "qwen3_coder": f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value></tool_call>",
        "minimax_m2": f'<minimax:tool_call><invoke name="f"><parameter name="x">{text}</parameter></invoke>',
    }[name]
    (call,) = collect_message([*parser.push(written), *parser.finish()]).tool_calls
    return json.loads(call.arguments)["x"]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        # No type is declared: the JSON value that the text spells.
        ('{"a": [1]}', {}, {"a": [1]}),
        ("42", True, 42),
        ("true", {"description": "any"}, True),
        ("None", {}, None),
        ("(1, 2)", {}, "(1, 2)"),
        ("Oslo", {}, "Oslo"),
        ("NaN", {}, "NaN"),
        # The types come from a reference, values or choices.
        ('{"a": 1}', {"$ref": "#/$defs/Point"}, {"a": 1}),
        ("42", {"$ref": "#/$defs/Name"}, "42"),
        ("42", {"$ref": "#/$defs/Missing"}, 42),
        ("42", {"$ref": "https://example.com/x"}, 42),
        ("42", {"const": 42}, 42),
        ("42", {"const": "42"}, "42"),
        ("true", {"enum": [True, 7]}, True),
        ("42", {"enum": ["42", 7]}, "42"),
        ("7", {"enum": ["42", 7]}, 7),
        (" b ", {"enum": ["a", "b"]}, "b"),
        ("42", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 42),
        ("42", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "42"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ('{"a": 1}', {"oneOf": [{"$ref": "#/$defs/Point"}, {"type": "string"}]}, {"a": 1}),
        ("[1]", {"anyOf": [{"type": "string"}, {}]}, [1]),
        ("3", {"type": ["string", "number"]}, 3),
        ('"quoted"', {"type": ["string", "null"]}, '"quoted"'),
        ("42", {"type": "string"}, "42"),
        # A reference to itself ends.
        ("42", {"$ref": "#/properties/x"}, 42),
    ],
)
def test_text_becomes_the_value_of_the_schema(name: str, text: str, schema: Any, expected: Any) -> None:
    found = value(text, schema, name)
    assert (found, type(found)) == (expected, type(expected))
