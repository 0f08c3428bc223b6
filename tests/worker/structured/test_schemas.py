"""Every output of an accepted schema is valid by the package jsonschema; the other schemas are refused by keyword."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammars import demo_library, random_walk
from json_schemas import FILES, is_checked_exactly, records, validator

from quire.worker.structured.compilation import GUIDANCE, XGRAMMAR, GrammarLibrary
from quire.worker.structured.grammar import GrammarSpec, UnsupportedConstraint
from quire.worker.structured.json_schema import check_exact_in_xgrammar, close_objects

MAX_WALKS = 4
# (schemas, backend) |-> at least so many of them are accepted.
MIN_ACCEPTED = {
    ("json_schema_test_suite", XGRAMMAR): 11,
    ("json_schema_test_suite", GUIDANCE): 35,
    ("schemastore", XGRAMMAR): 4,
    ("schemastore", GUIDANCE): 25,
}


@pytest.fixture(scope="module")
def library() -> GrammarLibrary:
    return demo_library()


def compile_or_reason(library: GrammarLibrary, schema: Any, backend: str) -> bytes | str:
    try:
        return library.compile(GrammarSpec("json", json.dumps(schema)), backend)
    except UnsupportedConstraint as error:
        return str(error)


@pytest.mark.parametrize("backend", [XGRAMMAR, GUIDANCE])
@pytest.mark.parametrize("name", FILES)
def test_every_output_of_an_accepted_schema_is_valid(
    library: GrammarLibrary, name: str, backend: str
) -> None:
    num_valid = num_accepted = 0
    for record in records(name):
        compiled = compile_or_reason(library, record["schema"], backend)
        if isinstance(compiled, str) or not is_checked_exactly(record["schema"]):
            continue
        num_accepted += 1
        grammar, check = library.load(compiled), validator(record)
        for seed in range(MAX_WALKS):
            walk = random_walk(grammar, library.vocabulary, seed, max_tokens=100)
            if walk.is_finished:
                value = json.loads(walk.text)
                assert check.is_valid(value), f"{record['id']}: {walk.text.decode()}"
                num_valid += 1
    assert num_accepted >= MIN_ACCEPTED[name, backend]
    assert num_valid > num_accepted


def test_refused_schemas_are_refused_by_keyword(library: GrammarLibrary) -> None:
    for schema, keyword in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "regex"}, "regex"),
        ({"if": {}, "then": False}, "then"),
        (False, "false"),
    ):
        reason = compile_or_reason(library, schema, "auto")
        assert isinstance(reason, str)
        assert keyword in reason


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties"),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "required": ["b"]},
            "required",
        ),
        ({"properties": {"a": {"type": "string"}}}, "properties"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern"),
        ({"$ref": "other.json"}, "ref"),
        ({"$ref": "#/$defs/a", "maxLength": 3}, "maxLength"),
        ({"enum": [1, "a"], "type": "string"}, "enum"),
    ],
)
def test_what_xgrammar_ignores_is_left_to_the_other_backend(schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=keyword):
        check_exact_in_xgrammar(schema)


def test_closed_objects_have_no_further_properties() -> None:
    schema = {"properties": {"a": {"properties": {"b": {}}}}, "anyOf": [{"properties": {}}, {}]}
    assert close_objects(schema) == {
        "properties": {"a": {"properties": {"b": {}}, "additionalProperties": False}},
        "anyOf": [{"properties": {}, "additionalProperties": False}, {}],
        "additionalProperties": False,
    }
