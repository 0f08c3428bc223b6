"""Arguments of tool calls that a model writes as plain text: their JSON text, by the types of the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from .model_output import ModelOutput, Parse

_MAX_SCHEMA_DEPTH = 4
_TYPE_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def emit_text_argument(
    output: ModelOutput, name: str, is_first: bool, types: set[str], *ends: str
) -> Parse[str | None]:
    """Emit one member of the arguments, whose value is the text before one of the markers `ends`.

    A string is emitted as it comes, another value once it is complete. Text that is not of its type becomes a string.

    Args:
        types: allowed JSON types; empty if the schema does not tell.

    Returns:
        The marker that ended the value; None at the end of the text, where the member stays incomplete.
    """
    yield output.arguments(f"{'{' if is_first else ', '}{dump(name)}: ")
    if types <= {"string"}:
        yield output.arguments('"')
        end = yield from output.emit_until(lambda piece: output.arguments(dump(piece)[1:-1]), *ends)
        if end is not None:
            yield output.arguments('"')
        return end
    text, end = yield from output.text_until(*ends)
    if end is not None:
        yield output.arguments(_typed_json(text, types))
    return end


def types_of(schema: Mapping[str, Any], parameter: str) -> set[str]:
    """Return the JSON types that a parameter may have by its tool's schema; empty if it does not tell."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return set()
    return _types(properties.get(parameter), 0)


def dump(value: Any) -> str:
    """Return the JSON text of a value; characters beyond ASCII stay as they are where UTF-8 can encode them.

    Raises:
        ValueError: the value has a number that JSON has not, or that has too many digits.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError if the text is none."""
    try:
        value = ast.literal_eval(text)
        dump(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error
    return value


def _types(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return set()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found |= {each for each in declared if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            found |= _types(choice, depth + 1)
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found = {_TYPE_OF_VALUE.get(type(value), "object") for value in values}
    return found


def _typed_json(text: str, types: set[str]) -> str:
    stripped = text.strip()
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower()
    for read in (json.loads, literal):
        try:
            value = read(stripped)
            value_json = dump(value)
        except (ValueError, RecursionError):
            continue
        if "string" not in types or (value is None and "null" in types):
            return value_json
    return dump(text)
