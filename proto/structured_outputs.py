"""Constraints on an output: as a client states them, and compiled as ranks apply them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from . import coerce as plain
from .errors import InvalidRequest, InvalidType

_OWNER = "sampling.structured_outputs"

# Of a schema, a regular expression, a grammar or a structural tag.
MAX_CONSTRAINT_CHARS = 1 << 19
MAX_CHOICES = 16384
MAX_CONSTRAINT_DEPTH = 64
# Checking and writing these takes 15 ms in the event loop.
MAX_CONSTRAINT_VALUES = 1 << 16
_SCALARS = frozenset({str, int, float, bool, type(None)})
MAX_PATTERN_TOKENS = 512
MAX_PATTERN_REPEATS = 1024


@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint on an output, named as in vLLM. Exactly one of the first six fields is set.

    Args:
        json: a JSON schema, as a mapping or as JSON text. Stored as text.
        regex: a regular expression that the whole output matches.
        choice: texts of which the output is one.
        grammar: a context-free grammar in EBNF as llama.cpp writes it (GBNF), whose root is the rule ``root``; or in
            Lark's syntax, whose root is the rule ``start``.
        json_object: True for any JSON object.
        structural_tag: free text with constrained parts, as xgrammar's structural tags describe it.
            A mapping or JSON text; stored as text.
        disable_any_whitespace: JSON without white space between its parts.
        disable_additional_properties: objects have no properties beside those that their schema lists.

    Raises:
        InvalidRequest: none or several of the fields are set, or one is too large.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "is empty"
            raise InvalidRequest(_OWNER, f"{found}, must have exactly one of {', '.join(KINDS)}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            setattr(self, name, plain.flag(f"{_OWNER}.{name}", getattr(self, name)))
        kind = given[0]
        setattr(self, kind, _CONVERTERS[kind](f"{_OWNER}.{kind}", getattr(self, kind)))

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The constraint's text: a schema, an expression, a grammar, a tag, or the choices as a JSON list."""
        value = getattr(self, self.kind)
        if self.kind == "choice":
            return json.dumps(value)
        return "" if self.kind == "json_object" else str(value)

    @staticmethod
    def of(field: str, given: Any) -> StructuredOutputsParams:
        """Return the constraint that a caller gave, also as a mapping. Raises InvalidRequest for another type.

        Clients of vLLM send all of its fields; those that are unknown here are ignored if they ask for nothing.
        """
        if isinstance(given, StructuredOutputsParams):
            return given
        if not isinstance(given, Mapping):
            raise InvalidType(field, f"is of type {type(given).__name__}, must be a StructuredOutputsParams")
        known = {member.name for member in fields(StructuredOutputsParams)}
        unknown = sorted(
            str(name) for name, value in given.items() if name not in known and value not in (None, False)
        )
        if unknown:
            raise InvalidRequest(f"{field}.{unknown[0][:64]}", f"is unknown, must be one of {sorted(known)}")
        return StructuredOutputsParams(**{name: value for name, value in given.items() if name in known})


class RepetitionDetectionParams(NamedTuple):
    """Ends an output that repeats itself, named as in vLLM. The finish reason is ``repetition``.

    Attributes:
        max_pattern_size: most tokens of a pattern.
        min_pattern_size: fewest tokens of a pattern; 0 means 1.
        min_count: times that a pattern must occur in succession at the end of the output.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    @staticmethod
    def of(field: str, given: Any) -> RepetitionDetectionParams:
        """Return the checked settings. Raises InvalidRequest for a value out of its range."""
        if isinstance(given, Mapping):
            unknown = sorted(str(name) for name in given if name not in RepetitionDetectionParams._fields)
            if unknown:
                allowed = ", ".join(RepetitionDetectionParams._fields)
                raise InvalidRequest(f"{field}.{unknown[0][:64]}", f"is unknown, must be one of {allowed}")
            given = RepetitionDetectionParams(**given)
        elif not isinstance(given, list | tuple):
            given = tuple(getattr(given, name, None) for name in RepetitionDetectionParams._fields)
        if len(given) != len(RepetitionDetectionParams._fields):
            raise InvalidRequest(
                field, f"has {len(given)} numbers, must have {len(RepetitionDetectionParams._fields)}"
            )
        longest, shortest, count = (
            plain.whole_number(f"{field}.{name}", value)
            for name, value in zip(RepetitionDetectionParams._fields, given, strict=True)
        )
        shortest = shortest or 1
        for name, value, least, most in (
            ("max_pattern_size", longest, 1, MAX_PATTERN_TOKENS),
            ("min_pattern_size", shortest, 1, longest),
            ("min_count", count, 2, MAX_PATTERN_REPEATS),
        ):
            if not least <= value <= most:
                raise InvalidRequest(f"{field}.{name}", f"is {value}, must be from {least} to {most}")
        return RepetitionDetectionParams(longest, shortest, count)


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """The constraint of one request's outputs, compiled. Its state is a function of the generated tokens.

    Attributes:
        num_prompt_tokens: tokens of the prompt; the output follows them.
        grammar: compiled grammar, see worker.structured; empty for none.
        reasoning_starts: texts with which a model begins its reasoning if it reasons; empty if the prompt has begun
            it or there is none.
        reasoning_ends: texts that end the reasoning. The grammar begins after the token that completes one of them.
            Empty if there is no reasoning.
        thinking_token_budget: most tokens of the reasoning; None for no limit.
        forced_end_ids: tokens that end the reasoning when its budget is used up.
    """

    num_prompt_tokens: int
    grammar: bytes = b""
    reasoning_starts: tuple[str, ...] = ()
    reasoning_ends: tuple[str, ...] = ()
    thinking_token_budget: int | None = None
    forced_end_ids: tuple[int, ...] = ()


def _text(field: str, given: Any) -> str:
    if not isinstance(given, str):
        raise InvalidType(field, f"is of type {type(given).__name__}, must be text")
    if not 0 < len(given) <= MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(field, f"has {len(given)} characters, must have 1 to {MAX_CONSTRAINT_CHARS}")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode text at character {error.start}") from error
    return given


def _json_text(field: str, given: Any) -> str:
    """Return a JSON object or boolean as text, from a value or a text."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(_text(field, given))
        except RecursionError:
            raise _too_deep(field) from None
        except ValueError as error:
            raise InvalidRequest(field, f"is not JSON: {error}") from error
    if not isinstance(value, Mapping | bool):
        raise InvalidType(field, f"is of type {type(value).__name__}, must be an object")
    _check_shape(field, value)
    try:
        return _text(field, json.dumps(value, allow_nan=False, default=_as_plain, ensure_ascii=False))
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(field, f"is not JSON: {error}") from error


def _check_shape(field: str, value: Any) -> None:
    """Raise InvalidRequest if a JSON value is nested too deeply or has too many values."""
    num_values, pending = 0, [value] if _is_container(value) else []
    for _ in range(MAX_CONSTRAINT_DEPTH - 1):
        num_values += sum(map(len, pending))
        if num_values > MAX_CONSTRAINT_VALUES:
            raise InvalidRequest(field, f"has more than {MAX_CONSTRAINT_VALUES} values")
        members = (each.values() if isinstance(each, Mapping) else each for each in pending)
        pending = [member for each in members for member in each if _is_container(member)]
    if any(pending):
        raise _too_deep(field)


def _is_container(value: Any) -> bool:
    return type(value) not in _SCALARS and isinstance(value, list | tuple | Mapping)


def _too_deep(field: str) -> InvalidRequest:
    return InvalidRequest(field, f"is nested too deeply, must have at most {MAX_CONSTRAINT_DEPTH} levels")


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"has a value of type {type(value).__name__}")


def _choices(field: str, given: Any) -> tuple[str, ...]:
    texts = plain.texts(field, given)
    if not 0 < len(texts) <= MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(texts)} texts, must have 1 to {MAX_CHOICES}")
    num_chars = sum(map(len, texts))
    if num_chars > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(field, f"has {num_chars} characters, must have at most {MAX_CONSTRAINT_CHARS}")
    for index, text in enumerate(texts):
        _text(f"{field}[{index}]", text)
    return texts


def _true(field: str, given: Any) -> bool:
    if not plain.flag(field, given):
        raise InvalidRequest(field, "is false, must be true or left out")
    return True


_CONVERTERS = {
    "json": _json_text,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
    "json_object": _true,
    "structural_tag": _json_text,
}
KINDS = tuple(_CONVERTERS)
