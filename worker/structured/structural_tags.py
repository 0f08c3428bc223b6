"""Structural tags: checks them, and replaces the texts of special tokens by the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .grammar import MAX_WHITESPACE_CHARS, UnsupportedConstraint
from .json_schema import check_exact_in_xgrammar
from .vocabulary import Vocabulary

# In a tag of quire's own making: the schema is applied as far as the library does.
LENIENT = "x-quire-lenient"
_SCHEMA_STYLES = frozenset({"json"})


def prepare_tag(tag: Any, vocabulary: Vocabulary) -> Mapping[str, Any]:
    """Return a structural tag for the compiler.

    Constant strings may contain special tokens, which no text matches.

    Raises:
        UnsupportedConstraint: a JSON schema in the tag is not applied exactly, or the tag has another layout.
    """
    if not isinstance(tag, Mapping):
        raise UnsupportedConstraint("a structural tag must be an object")
    if "structures" in tag:
        tag = from_structures(tag)
    if tag.get("type", "structural_tag") != "structural_tag" or "format" not in tag:
        raise UnsupportedConstraint("a structural tag must have the type structural_tag and a format")
    return {"type": "structural_tag", "format": _prepare(tag["format"], vocabulary)}


def split_special_tokens(text: str, vocabulary: Vocabulary) -> list[str | int]:
    """Return the parts of a text, with the ids of special tokens instead of their names."""
    pattern = vocabulary.special_pattern
    ids = vocabulary.special_by_text
    parts = pattern.split(text) if pattern else [text]
    return [ids.get(part, part) for part in parts if part]


def _prepare(constraint: Any, vocabulary: Vocabulary) -> Any:
    if isinstance(constraint, list):
        return [_prepare(each, vocabulary) for each in constraint]
    if not isinstance(constraint, Mapping):
        return constraint
    if constraint.get("type") == "const_string" and isinstance(constraint.get("value"), str):
        parts = _formats(constraint["value"], vocabulary)
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}
    if constraint.get("type") == "json_schema":
        return _prepare_schema(constraint)
    if constraint.get("type") == "dispatch":
        return _prepare_dispatch(constraint, vocabulary)
    return {name: _prepare(value, vocabulary) for name, value in constraint.items()}


def _formats(text: str, vocabulary: Vocabulary) -> list[Mapping[str, Any]]:
    return [
        {"type": "token", "token": part} if isinstance(part, int) else {"type": "const_string", "value": part}
        for part in split_special_tokens(text, vocabulary)
    ]


def _prepare_schema(constraint: Mapping[str, Any]) -> Mapping[str, Any]:
    if not constraint.get(LENIENT) and constraint.get("style", "json") in _SCHEMA_STYLES:
        check_exact_in_xgrammar(constraint.get("json_schema"))
    prepared = {name: value for name, value in constraint.items() if name != LENIENT}
    return {"max_whitespace_cnt": MAX_WHITESPACE_CHARS, **prepared}


def _prepare_dispatch(constraint: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
    """Return free text with patterns; patterns that are special tokens become tokens."""
    rules = [(pattern, _prepare(content, vocabulary)) for pattern, content in constraint.get("rules", ())]
    tokens = [_formats(pattern, vocabulary) for pattern, _ in rules]
    if all(len(parts) == 1 and parts[0]["type"] == "token" for parts in tokens):
        by_token = [(parts[0]["token"], content) for parts, (_, content) in zip(tokens, rules, strict=True)]
        return {"type": "token_dispatch", "rules": by_token, "loop": constraint.get("loop", True)}
    return {**constraint, "rules": rules}


def from_structures(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the present layout of the older one, a list of structures with ``begin``, ``schema`` and ``end``."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        return {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
    except (KeyError, TypeError) as error:
        raise UnsupportedConstraint(
            "a list of structures needs triggers, and each begin, schema and end"
        ) from error
