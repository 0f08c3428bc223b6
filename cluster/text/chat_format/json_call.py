"""Readers of JSON in a model's text: arguments, and objects with the name and the arguments of a call."""

from __future__ import annotations

import json
import re

from .json_text import JsonText
from .model_output import ModelOutput, Parse

NAME_KEYS = ("name", "tool_name", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "params")
# Other members before the name show that the object is no call.
_EARLY_KEYS = ("id", "type", "tool_call_id", *ARGUMENT_KEYS)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def call_name(output: ModelOutput, *ends: str) -> Parse[tuple[str | None, str]]:
    """Read ``{"name": NAME`` of a call whose keys may have any order.

    Returns:
        The name, None if the object is no call, and the text of the arguments that came before it.
    """
    if not (yield from output.accept("{")):
        return None, ""
    arguments = ""
    while (key := (yield from json_key(output))) is not None:
        if key in NAME_KEYS:
            return (yield from json_string(output)), arguments
        if key not in _EARLY_KEYS:
            break
        value = yield from collect_json(output, *ends)
        if key in ARGUMENT_KEYS:
            arguments = value
        yield from output.skip()
        if not (yield from output.accept(",")):
            break
    return None, ""


def emit_members(output: ModelOutput, *ends: str, has_arguments: bool) -> Parse[bool]:
    """Emit the arguments in the rest of a call's object and read past its end.

    Args:
        has_arguments: they came before.

    Returns:
        Whether there are arguments.
    """
    while (yield from _next_member(output)) and (key := (yield from json_key(output))) is not None:
        if key in ARGUMENT_KEYS and not has_arguments:
            has_arguments = yield from emit_arguments(output, *ends)
        else:
            yield from collect_json(output, *ends)
    return has_arguments


def emit_arguments(output: ModelOutput, *ends: str) -> Parse[bool]:
    """Emit the JSON object at the position as the arguments of the call. Returns whether there was a value.

    A string with the text of an object, as models write it that encode it twice, is decoded first. A value that no
    object is becomes an empty one. Ends at one of the markers at the latest; what is open is closed there, but stays
    open where the whole text ends.
    """
    first = yield from output.peek()
    if first == "{":
        yield from _pass_on(output, ends, emits=True)
        return True
    text = yield from collect_json(output, *ends)
    if text:
        yield output.arguments(object_text(text))
    return bool(text)


def collect_json(output: ModelOutput, *ends: str) -> Parse[str]:
    """Read a JSON value and return its text, mended where it is no JSON."""
    return _pass_on(output, ends, emits=False)


def object_text(text: str) -> str:
    """Return the JSON object that a value is or spells as a string; an empty one if it is none."""
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            text, value = value, json.loads(value, strict=False)
            scanner = JsonText()
            text = scanner.feed(text.strip())[0] + scanner.close()
    except (ValueError, RecursionError):
        return "{}"
    return text if isinstance(value, dict) else "{}"


def json_string(output: ModelOutput) -> Parse[str | None]:
    """Read a string and return its value; None if there is none that can be read."""
    if (yield from output.peek()) != '"':
        return None
    found = yield from output.match(_STRING)
    try:
        value = "" if found is None else str(json.loads(found[0], strict=False))
        value.encode()
    except ValueError:
        return None
    return value or None


def json_key(output: ModelOutput) -> Parse[str | None]:
    """Read a member's key and the colon; None if there is none."""
    yield from output.skip()
    key = yield from json_string(output)
    yield from output.skip()
    if key is None or not (yield from output.accept(":")):
        return None
    yield from output.skip()
    return key


def _pass_on(output: ModelOutput, ends: tuple[str, ...], *, emits: bool) -> Parse[str]:
    scanner, pieces = JsonText(), []
    while not scanner.is_complete:
        text, num_chars = scanner.feed(output.arrived(*ends))
        output.read(num_chars)
        is_stuck = not num_chars and not scanner.is_complete
        if is_stuck and output.is_at(*ends):
            text += scanner.rest() if output.is_at_end else scanner.close()
        if text and emits:
            yield output.arguments(text)
        elif text:
            pieces.append(text)
        if is_stuck and output.is_at_end:
            break
        if is_stuck and not scanner.is_complete:
            yield None
    return "".join(pieces)


def _next_member(output: ModelOutput) -> Parse[bool]:
    """Read the comma before another member or the object's end; return whether it was a comma."""
    yield from output.skip()
    return (yield from output.accept(",", "}")) == ","
