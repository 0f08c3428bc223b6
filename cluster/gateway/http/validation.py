"""Validation errors of pydantic as InvalidRequest, whose field is named as in the client's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from ....proto.errors import InvalidRequest

MAX_SHOWN_CHARS = 100
# Further problems that are named beside the first.
MAX_OTHERS = 3


def describe_validation_error(error: RequestValidationError) -> InvalidRequest:
    """Return the first problem, followed by short forms of the next ones."""
    problems = [_describe(each) for each in error.errors()[: 1 + MAX_OTHERS]]
    (field, problem), *others = problems
    more = "".join(f"; {name}: {text}" for name, text in others if name != field)
    return InvalidRequest(field, problem + more)


def _describe(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field and its problem."""
    kind, message = error["type"], str(error["msg"])
    message = message.removeprefix("Value error, ")
    if kind == "json_invalid":
        return "body", f"is not valid JSON: {error.get('ctx', {}).get('error', message)}"
    field = _field(error["loc"])
    if kind == "missing":
        return field, "is missing" if field != "body" else "is missing, must be a JSON object"
    if kind == "value_error":
        return field, message
    return field, f"is {_shown(error.get('input'))}: {message[:1].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """Return the beginning of the value's repr, whose whole may be of any length."""
    shown = ""
    for piece in _pieces(value):
        shown += piece
        if len(shown) > MAX_SHOWN_CHARS:
            return shown[:MAX_SHOWN_CHARS] + "..."
    return shown


def _pieces(value: Any) -> Iterator[str]:
    """Yield the repr of a JSON value, without the ends of long texts."""
    if isinstance(value, list):
        yield "["
        for index, each in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(each)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, each) in enumerate(value.items()):
            yield f"{', ' if index else ''}{name[: MAX_SHOWN_CHARS + 1]!r}: "
            yield from _pieces(each)
        yield "}"
    else:
        yield repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str | bytes) else value)


def _field(location: Sequence[str | int]) -> str:
    """Return ``messages[0].content`` for ("body", "messages", 0, "content"), without the branches of unions."""
    parts = (
        list(location[1:])
        if location and location[0] in ("body", "query", "path", "header")
        else list(location)
    )
    field = ""
    for part in parts:
        if isinstance(part, int):
            field += f"[{part}]"
        elif len(part) <= MAX_SHOWN_CHARS and part.isidentifier() and not part[:1].isupper():
            field += f".{part}" if field else part
    return field or "body"
