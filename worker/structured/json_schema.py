"""JSON schemas: which of them xgrammar applies exactly, and objects without further properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .grammar import UnsupportedConstraint

Schema = Mapping[str, Any] | bool

# Keywords whose value is a schema, a list of schemas, or a mapping from names to schemas.
_OF_ONE = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_OF_LIST = "allOf", "anyOf", "items", "oneOf", "prefixItems"
_OF_MAP = "$defs", "definitions", "dependentSchemas", "patternProperties", "properties"

# Keywords without effect on which values are valid.
_ANNOTATIONS = frozenset(
    {
        "$comment", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema",
        "default", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
_KNOWN = frozenset(
    {
        *_OF_ONE, *_OF_LIST, *_OF_MAP, *_ANNOTATIONS, "$anchor", "$dynamicAnchor", "$dynamicRef", "$ref",
        "$recursiveAnchor", "$recursiveRef", "const", "dependencies", "dependentRequired", "enum",
        "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength", "maxProperties",
        "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern",
        "required", "type", "uniqueItems",
    }
)  # fmt: skip

# type |-> keywords that xgrammar applies exactly beside it. Of a schema without a type it ignores some of them.
_EXACT: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_FORMATS = frozenset({"date", "date-time", "email", "ipv4", "ipv6", "time", "uuid"})
# Keywords that xgrammar applies alone; it ignores those beside them.
_ALONE = ("$ref", "const", "enum", "anyOf")
_STRUCTURE = frozenset({"$defs", "definitions"})


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield (keyword, schema) of the schemas directly inside a schema."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _OF_ONE:
        if isinstance(schema.get(keyword), Mapping | bool):
            yield keyword, schema[keyword]
    for keyword in _OF_LIST:
        if isinstance(schema.get(keyword), list):
            yield from ((keyword, each) for each in schema[keyword])
    for keyword in _OF_MAP:
        if isinstance(schema.get(keyword), Mapping):
            yield from ((keyword, each) for each in schema[keyword].values())


def check_exact_in_xgrammar(schema: Any) -> None:
    """Raise UnsupportedConstraint, which names the keyword, unless every output of xgrammar is valid.

    xgrammar ignores keywords that it does not know and many combinations of those that it does, without a word.
    """
    pending = [schema]
    while pending:
        each = pending.pop()
        if not isinstance(each, Mapping):
            continue
        _check_one(each)
        pending += [inner for _, inner in subschemas(each)]


def _check_one(schema: Mapping[str, Any]) -> None:
    given = {name for name in schema if name in _KNOWN} - _ANNOTATIONS - _STRUCTURE
    for keyword in _ALONE:
        if keyword in given:
            _refuse_others(
                given - {keyword, "type"} if keyword in ("const", "enum") else given - {keyword}, keyword
            )
            if keyword in ("const", "enum") and "type" in given:
                _check_constants(schema, keyword)
            if keyword == "$ref" and not (schema["$ref"] == "#" or str(schema["$ref"]).startswith("#/")):
                raise UnsupportedConstraint(f"$ref to {str(schema['$ref'])[:64]!r}")
            return
    if "type" not in given:
        _refuse_others(given, "no type")
        return
    kinds = schema["type"]
    if not isinstance(kinds, str):
        _refuse_others(given - {"type"}, "a list of types")
        return
    _refuse_others(given - {"type"} - _EXACT.get(kinds, frozenset()), f"type {kinds!r}")
    if kinds == "array":
        _check_array(schema)
    if kinds == "object":
        _check_object(schema)
    if kinds == "integer":
        _check_bounds(schema)
    if "format" in given and (schema["format"] not in _FORMATS or given & {"minLength", "maxLength"}):
        raise UnsupportedConstraint(f"format {str(schema['format'])[:64]!r}")


def _refuse_others(keywords: set[str] | frozenset[str], beside: str) -> None:
    if keywords:
        raise UnsupportedConstraint(f"{min(keywords)} beside {beside}")


def _check_constants(schema: Mapping[str, Any], keyword: str) -> None:
    values = [schema["const"]] if keyword == "const" else schema["enum"]
    kinds = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
    checks = [_IS_TYPE[kind] for kind in kinds if kind in _IS_TYPE]
    if not all(any(check(value) for check in checks) for value in values):
        raise UnsupportedConstraint(f"{keyword} with values of another type")


def _check_array(schema: Mapping[str, Any]) -> None:
    if isinstance(schema.get("items"), list):
        raise UnsupportedConstraint("items with a list of schemas")
    if schema.get("items") is False and "prefixItems" not in schema and schema.get("minItems"):
        raise UnsupportedConstraint("items that no value fulfils")


def _check_object(schema: Mapping[str, Any]) -> None:
    required = schema.get("required", ())
    unknown = sorted(set(required) - set(schema.get("properties", {})))
    if unknown:
        raise UnsupportedConstraint(f"required with {unknown[0][:64]!r}, which is not among the properties")
    if schema.get("properties") and schema.get("additionalProperties", True) is not False:
        # A further property may have the name of a listed one.
        raise UnsupportedConstraint("properties beside additionalProperties")


def _check_bounds(schema: Mapping[str, Any]) -> None:
    for keyword in _EXACT["integer"] & schema.keys():
        if not isinstance(schema[keyword], int):
            raise UnsupportedConstraint(f"{keyword} that is not a whole number")


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )


_IS_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def close_objects(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` where an object lists properties and says nothing."""
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _close_member(name, value) for name, value in schema.items()}
    if "additionalProperties" not in closed and closed.keys() & {"properties", "patternProperties"}:
        closed["additionalProperties"] = False
    return closed


def _close_member(keyword: str, value: Any) -> Any:
    if keyword in _OF_MAP and isinstance(value, Mapping):
        return {name: close_objects(each) for name, each in value.items()}
    if keyword in _OF_LIST and isinstance(value, list):
        return [close_objects(each) for each in value]
    return close_objects(value) if keyword in _OF_ONE else value
