"""Structural tags as grammars of llguidance, in its dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .grammar import MAX_WHITESPACE_CHARS, UnsupportedConstraint
from .structural_tags import LENIENT, from_structures, split_special_tokens
from .vocabulary import Vocabulary

WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE_CHARS}}}"

_TEXT = r"/(.|\n)*/"
# Class of Python's re |-> the same characters in Rust's syntax, whose own \w has combining marks and joiners, too,
# and lacks numbers as ², and whose \s lacks four separators. A class may be nested in another one.
_CLASSES = {
    r"\w": r"[\p{L}\p{N}_]",
    r"\W": r"[^\p{L}\p{N}_]",
    r"\s": r"[\s\x1C-\x1F]",
    r"\S": r"[^\s\x1C-\x1F]",
}


def with_python_classes(pattern: str) -> str:
    """Return a regular expression whose classes have the characters that they have in Python."""
    return re.sub(r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), pattern, flags=re.DOTALL)


def lark_of_tag(tag: Any, vocabulary: Vocabulary) -> str:
    """Return the grammar of a structural tag.

    Raises:
        UnsupportedConstraint: the tag is malformed, or has a format that cannot be translated.
    """
    if not isinstance(tag, Mapping):
        raise UnsupportedConstraint("a structural tag must be an object")
    if "structures" in tag:
        tag = from_structures(tag)
    if tag.get("type", "structural_tag") != "structural_tag" or "format" not in tag:
        raise UnsupportedConstraint("a structural tag must have the type structural_tag and a format")
    try:
        return _Writer(vocabulary).write(tag["format"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UnsupportedConstraint(f"the structural tag is malformed: {error!r}") from error


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rules: list[str] = []

    def write(self, constraint: Mapping[str, Any]) -> str:
        start = self._expression(constraint)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _expression(self, constraint: Mapping[str, Any]) -> str:
        """Return the part of a rule that matches a format."""
        kind = constraint.get("type")
        write = _WRITERS.get(str(kind))
        if write is None:
            raise UnsupportedConstraint(f"the format {str(kind)[:64]!r} of a structural tag")
        return write(self, constraint)

    def const_string(self, constraint: Mapping[str, Any]) -> str:
        return self._text(constraint["value"])

    def token(self, constraint: Mapping[str, Any]) -> str:
        return self._token(constraint["token"])

    def json_schema(self, constraint: Mapping[str, Any]) -> str:
        style, schema = constraint.get("style", "json"), constraint["json_schema"]
        if constraint.get("any_order") or constraint.get("excludes"):
            raise UnsupportedConstraint("any_order and excludes of a JSON schema")
        is_lenient = bool(constraint.get(LENIENT))
        if style in _ARGUMENT_TAGS:
            return self._arguments(schema, is_lenient, *_ARGUMENT_TAGS[style])
        if style != "json":
            raise UnsupportedConstraint(f"the style {str(style)[:64]!r} of a JSON schema")
        return _json(schema, is_lenient)

    def _arguments(self, schema: Mapping[str, Any], is_lenient: bool, begin: str, end: str) -> str:
        """Return arguments that are written between tags, each with its name: strings as they are, others as JSON."""
        parts = []
        for name, value in schema.get("properties", {}).items():
            opening = json.dumps(begin.replace("{name}", name))
            argument = f"{opening} {self._argument(value, is_lenient, end)}"
            parts.append(argument if name in schema.get("required", ()) else f"({argument})?")
        return " ".join(parts) or '""'

    def _argument(self, schema: Any, is_lenient: bool, end: str) -> str:
        """Return the value of an argument, and the text that ends it."""
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if texts is not None and all(isinstance(text, str) for text in texts):
            return f"{self._any([json.dumps(text) for text in texts])} {json.dumps(end)}"
        if schema.get("type") != "string":
            return f"{_json(schema, is_lenient)} {json.dumps(end)}"
        others = schema.keys() & {"pattern", "format", "minLength", "maxLength"}
        if others and not is_lenient:
            raise UnsupportedConstraint(f"{min(others)} of an argument that is written as it is")
        return self._item(end, "")

    def regex(self, constraint: Mapping[str, Any]) -> str:
        pattern = with_python_classes(constraint["pattern"]).replace("/", r"\/").replace("\n", r"\n")
        return f"/{pattern}/"

    def any_text(self, constraint: Mapping[str, Any]) -> str:
        if constraint.get("excludes") or constraint.get("max_tokens") or constraint.get("max_chars"):
            raise UnsupportedConstraint("limits of a text in a structural tag")
        return _TEXT

    def sequence(self, constraint: Mapping[str, Any]) -> str:
        return " ".join(self._expression(each) for each in constraint["elements"])

    def either(self, constraint: Mapping[str, Any]) -> str:
        return self._any([self._expression(each) for each in constraint["elements"]])

    def repeated(self, constraint: Mapping[str, Any]) -> str:
        inner = self._expression(constraint["content"])
        if constraint["type"] != "repeat":
            return f"({inner}){_SUFFIXES[constraint['type']]}"
        least, most = int(constraint["min"]), int(constraint["max"])
        return f"({inner}){{{least},{'' if most < 0 else most}}}"

    def tag(self, constraint: Mapping[str, Any]) -> str:
        return f"{self._text(constraint['begin'])} {self._content_and_end(constraint)}"

    def tags_with_separator(self, constraint: Mapping[str, Any]) -> str:
        tag = self._any([self.tag(each) for each in constraint["tags"]])
        more = (
            "" if constraint.get("stop_after_first") else f" ({self._text(constraint['separator'])} {tag})*"
        )
        return f"{tag}{more}" if constraint.get("at_least_one") else f"({tag}{more})?"

    def triggered_tags(self, constraint: Mapping[str, Any]) -> str:
        if constraint.get("excludes"):
            raise UnsupportedConstraint("excluded texts in a structural tag")
        after: list[tuple[str, str]] = []
        for tag in constraint["tags"]:
            trigger = next((text for text in constraint["triggers"] if tag["begin"].startswith(text)), None)
            if not trigger:
                raise UnsupportedConstraint(f"no trigger begins the tag {str(tag['begin'])[:64]!r}")
            after.append(
                (trigger, f"{self._text(tag['begin'].removeprefix(trigger))} {self._content_and_end(tag)}")
            )
        in_text = self._in_text(after, loop=not constraint.get("stop_after_first"))
        if not constraint.get("at_least_one"):
            return in_text
        first = self._any([self.tag(each) for each in constraint["tags"]])
        return first if constraint.get("stop_after_first") else f"{first} {in_text}"

    def dispatch(self, constraint: Mapping[str, Any]) -> str:
        if constraint.get("excludes"):
            raise UnsupportedConstraint("excluded texts in a structural tag")
        after = [(pattern, self._expression(content)) for pattern, content in constraint["rules"]]
        return self._in_text(after, loop=constraint.get("loop", True))

    def _in_text(self, after: Sequence[tuple[str, str]], *, loop: bool) -> str:
        """Return free text in which each pattern is followed by its expression."""
        items = [self._item(pattern, expression) for pattern, expression in after]
        return f"({' | '.join(items)})* {_TEXT}" if loop else f"({' | '.join(items)} | {_TEXT})"

    def _item(self, pattern: str, expression: str) -> str:
        """Return text up to the first occurrence of a pattern, and what follows it."""
        parts = split_special_tokens(pattern, self._vocabulary)
        if len(parts) == 1 and isinstance(parts[0], int):
            return f"{_TEXT} {self._token(parts[0])} {expression}"
        # A lazy rule ends where its text first matches, so that no longer text skips the pattern.
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {_TEXT} {json.dumps(pattern)}")
        return f"{name} {expression}"

    def _content_and_end(self, tag: Mapping[str, Any]) -> str:
        ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        content = tag["content"]
        if content.get("type") != "any_text":
            return f"{self._expression(content)} {self._any([self._text(end) for end in ends])}"
        self.any_text(content)
        return self._any([self._item(end, "") for end in ends])

    def _text(self, text: Any) -> str:
        """Return a text, whose special tokens no string matches, or a token."""
        if isinstance(text, Mapping):
            return self._token(text["token"])
        parts = split_special_tokens(text, self._vocabulary)
        return " ".join(self._token(part) if isinstance(part, int) else json.dumps(part) for part in parts)

    def _token(self, token: int | str) -> str:
        if isinstance(token, str):
            if token not in self._vocabulary.special_by_text:
                raise UnsupportedConstraint(f"the model has no special token {token[:64]!r}")
            token = self._vocabulary.special_by_text[token]
        return f"<[{int(token)}]>"

    def _any(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def _json(schema: Any, is_lenient: bool) -> str:
    """Return JSON of a schema.

    Args:
        is_lenient: ignore keywords that the library does not know.
    """
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE} | ({"lenient": True} if is_lenient else {})
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UnsupportedConstraint(f"the JSON schema {json.dumps(schema)[:64]}")
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


# Style of a JSON schema |-> texts before and after the value of an argument.
_ARGUMENT_TAGS = {
    "qwen_xml": ("<parameter={name}>\n", "\n</parameter>\n"),
    "glm_xml": ("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax_xml": ('<parameter name="{name}">', "</parameter>\n"),
}
_SUFFIXES = {"star": "*", "plus": "+", "optional": "?"}
_WRITERS: Mapping[str, Callable[[_Writer, Mapping[str, Any]], str]] = {
    "any_text": _Writer.any_text,
    "const_string": _Writer.const_string,
    "dispatch": _Writer.dispatch,
    "json_schema": _Writer.json_schema,
    "optional": _Writer.repeated,
    "or": _Writer.either,
    "plus": _Writer.repeated,
    "regex": _Writer.regex,
    "repeat": _Writer.repeated,
    "sequence": _Writer.sequence,
    "star": _Writer.repeated,
    "tag": _Writer.tag,
    "tags_with_separator": _Writer.tags_with_separator,
    "token": _Writer.token,
    "triggered_tags": _Writer.triggered_tags,
}
