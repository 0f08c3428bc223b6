"""Arguments of tool calls that a model writes as plain text: their JSON text, by the types of the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .model_output import ModelOutput, Parse

_MAX_SCHEMA_DEPTH = 8
_JSON_TYPES: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object",
}  # fmt: skip
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """Types of an argument by a tool's schema.

    Attributes:
        types: allowed JSON types; empty for any.
        texts: the texts that it may be, if the schema lists values.
    """

    types: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()

    def json(self, text: str) -> str:
        """Return the JSON text of the value that a text spells; of the text itself if that is of no allowed type."""
        stripped = text.strip()
        if stripped in self.texts:
            return dump(stripped)
        if stripped.lower() in ("true", "false") and "boolean" in self.types:
            return stripped.lower()
        if stripped in _PYTHON_NAMES and not self.types:
            return _PYTHON_NAMES[stripped]
        for read in (json.loads, literal) if self.types else (json.loads,):
            try:
                value = read(stripped)
                value_json = dump(value)
            except (ValueError, RecursionError):
                continue
            found = _type_of(value)
            is_typed = found in self.types or (found == "integer" and "number" in self.types)
            if "string" not in self.types or (is_typed and found != "string"):
                return value_json
        return dump(text)


STRING = ArgumentType(frozenset({"string"}))


def emit_text_argument(
    output: ModelOutput, name: str, is_first: bool, declared: ArgumentType, *ends: str
) -> Parse[str | None]:
    """Emit one member of the arguments, whose value is the text before one of the markers `ends`.

    A string is emitted as it comes, another value once it is complete. Text that is not of its type becomes a string.

    Returns:
        The marker that ended the value; None at the end of the text, where the member stays incomplete.
    """
    yield output.arguments(f"{'{' if is_first else ', '}{dump(name)}: ")
    if declared == STRING:
        yield output.arguments('"')
        end = yield from output.emit_until(lambda piece: output.arguments(dump(piece)[1:-1]), *ends)
        if end is not None:
            yield output.arguments('"')
        return end
    text, end = yield from output.text_until(*ends)
    if end is not None:
        yield output.arguments(declared.json(text))
    return end


def argument_type(schema: Mapping[str, Any], parameter: str) -> ArgumentType:
    """Return what a tool's schema tells of a parameter. One that it does not declare is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or parameter not in properties:
        return STRING
    return told_type(properties[parameter], schema)


def told_type(schema: Any, root: Mapping[str, Any]) -> ArgumentType:
    """Return what a part of a tool's schema tells of its values.

    Args:
        root: the tool's schema, to which references of the part lead.
    """
    return _told(schema, root, 0)


def members_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a tool's schema that has the ``properties`` or ``items`` of a part, after its references."""
    for _ in range(_MAX_SCHEMA_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = _referred(schema["$ref"], root)
    return schema if isinstance(schema, Mapping) else {}


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


def _type_of(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "array")


def _told(schema: Any, root: Mapping[str, Any], depth: int) -> ArgumentType:
    """Return what a schema tells by itself, its values, its choices or the schema that it refers to."""
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return ArgumentType()
    listed = schema.get("enum")
    values = [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []
    if values:
        texts = frozenset(value for value in values if isinstance(value, str))
        return ArgumentType(frozenset(map(_type_of, values)), texts)
    declared = schema.get("type")
    if isinstance(declared, str):
        return ArgumentType(frozenset({declared}))
    if isinstance(declared, list):
        return ArgumentType(frozenset(each for each in declared if isinstance(each, str)))
    if isinstance(schema.get("$ref"), str):
        return _told(_referred(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = [_told(choice, root, depth + 1) for choice in schema[key]]
            told = [each for each in found if each.types]
            if key == "allOf" or len(told) == len(found):
                return _union(told)
    return ArgumentType()


def _union(choices: list[ArgumentType]) -> ArgumentType:
    # A choice of any string makes the listed ones meaningless.
    is_listed = all(each.texts or "string" not in each.types for each in choices)
    texts = frozenset[str]().union(*(each.texts for each in choices)) if is_listed else frozenset[str]()
    return ArgumentType(frozenset[str]().union(*(each.types for each in choices)), texts)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that ``#/...`` refers to; None for another reference."""
    part: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part if reference.startswith("#") else None
