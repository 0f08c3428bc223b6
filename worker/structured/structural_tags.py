"""Structural tags: checks them, and replaces the texts of special tokens by the tokens."""

from __future__ import annotations

import re
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
        UnsupportedConstraint: a JSON schema in the tag is not applied exactly, or the tag has another form.
    """
    if not isinstance(tag, Mapping):
        raise UnsupportedConstraint("a structural tag must be an object")
    if "structures" in tag:
        tag = _from_structures(tag)
    if tag.get("type", "structural_tag") != "structural_tag" or "format" not in tag:
        raise UnsupportedConstraint("a structural tag must have the type structural_tag and a format")
    return {"type": "structural_tag", "format": _prepare(tag["format"], _Splitter(vocabulary))}


class _Splitter:
    """Splits texts at special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.special_by_text
        names = sorted(filter(None, self._ids), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def formats(self, text: str) -> list[Mapping[str, Any]]:
        parts = self._pattern.split(text) if self._pattern else [text]
        return [
            {"type": "token", "token": self._ids[part]}
            if part in self._ids
            else {"type": "const_string", "value": part}
            for part in parts
            if part
        ]


def _prepare(form: Any, splitter: _Splitter) -> Any:
    if isinstance(form, list):
        return [_prepare(each, splitter) for each in form]
    if not isinstance(form, Mapping):
        return form
    if form.get("type") == "const_string" and isinstance(form.get("value"), str):
        parts = splitter.formats(form["value"])
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}
    if form.get("type") == "json_schema":
        return _prepare_schema(form)
    if form.get("type") == "dispatch":
        return _prepare_dispatch(form, splitter)
    return {name: _prepare(value, splitter) for name, value in form.items()}


def _prepare_schema(form: Mapping[str, Any]) -> Mapping[str, Any]:
    if not form.get(LENIENT) and form.get("style", "json") in _SCHEMA_STYLES:
        check_exact_in_xgrammar(form.get("json_schema"))
    prepared = {name: value for name, value in form.items() if name != LENIENT}
    return {"max_whitespace_cnt": MAX_WHITESPACE_CHARS, **prepared}


def _prepare_dispatch(form: Mapping[str, Any], splitter: _Splitter) -> Mapping[str, Any]:
    """Return free text with patterns; patterns that are special tokens become tokens."""
    rules = [(pattern, _prepare(content, splitter)) for pattern, content in form.get("rules", ())]
    tokens = [splitter.formats(pattern) for pattern, _ in rules]
    if all(len(parts) == 1 and parts[0]["type"] == "token" for parts in tokens):
        by_token = [(parts[0]["token"], content) for parts, (_, content) in zip(tokens, rules, strict=True)]
        return {"type": "token_dispatch", "rules": by_token, "loop": form.get("loop", True)}
    return {**form, "rules": rules}


def _from_structures(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the present form of the older one, a list of structures with ``begin``, ``schema`` and ``end``."""
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
