"""Tool calls that a model writes as JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .deltas import ChatDelta
from .model_output import ModelOutput, Parse

_ARGUMENT_KEYS = ("arguments", "parameters")
# Other members before the name show that the object is no call.
_EARLY_KEYS = ("id", "type", *_ARGUMENT_KEYS)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

# name |-> whether a function of this name may be called
Accepts = Callable[[str], bool]


def accept_all(name: str) -> bool:
    return True


def json_call(output: ModelOutput, *ends: str, accepts: Accepts = accept_all) -> Parse[bool]:
    """Read one call, ``{"name": ..., "arguments": {...}}`` with its keys in any order.

    Invalid JSON in the arguments is passed on. If the object has no name that is accepted, nothing is read and the
    function returns False.

    Args:
        ends: markers that end the call wherever they come.
    """
    output.bookmark()
    name, arguments = yield from _header(output, ends)
    if name is None or not accepts(name):
        output.rewind()
        return False
    output.commit()
    yield output.start_call(name)
    if arguments:
        yield output.arguments(arguments)
    elif not (yield from _emit_arguments(output, ends)):
        yield output.arguments("{}")
    yield from _skip_members(output, ends)
    return True


def json_calls(output: ModelOutput, *ends: str, accepts: Accepts = accept_all) -> Parse[bool]:
    """Read one call or a JSON list of calls. Returns False if there is none, with nothing read."""
    output.bookmark()
    yield from output.skip()
    is_list = yield from output.accept("[")
    if not (yield from json_call(output, *ends, accepts=accepts)):
        output.rewind()
        return False
    output.commit()
    while is_list:
        yield from output.skip()
        if (yield from output.accept(",", "]")) != ",":
            break
        if not (yield from json_call(output, *ends)):
            break
    return True


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


def emit_json_value(output: ModelOutput, make: Callable[[str], ChatDelta], *ends: str) -> Parse[bool]:
    """Emit the text of a JSON value as it comes. Returns whether there was any.

    The value ends where its brackets are balanced, or at one of the markers `ends`.
    """
    scanner, found = _ValueScanner(), False
    while not scanner.is_complete:
        piece = output.read(scanner.feed(output.arrived(*ends)))
        if piece:
            yield make(piece)
            found = True
        elif scanner.is_complete or output.is_at(*ends):
            break
        else:
            yield None
    return found


def collect_json_value(output: ModelOutput, *ends: str) -> Parse[str]:
    """Read a JSON value and return its text."""
    scanner, pieces = _ValueScanner(), []
    while not scanner.is_complete:
        piece = output.read(scanner.feed(output.arrived(*ends)))
        if piece:
            pieces.append(piece)
        elif scanner.is_complete or output.is_at(*ends):
            break
        else:
            yield None
    return "".join(pieces)


class _ValueScanner:
    """Finds the end of a JSON value by its quotes and brackets; its other text may be invalid.

    Attributes:
        is_complete: the end was found.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Return how many characters of a piece belong to the value."""
        for position, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
                if not self._in_string and not self._depth:
                    self.is_complete = True
                    return position + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif not self._depth and character in ",}] \t\r\n":
                self.is_complete = True
                return position
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_complete = True
                    return position + 1
        return len(text)


def _header(output: ModelOutput, ends: tuple[str, ...]) -> Parse[tuple[str | None, str]]:
    """Read up to the name; return it with the arguments that came before it. The name is None if there is none."""
    yield from output.skip()
    if not (yield from output.accept("{")):
        return None, ""
    arguments = ""
    while (key := (yield from _key(output))) is not None:
        if key == "name":
            return (yield from json_string(output)), arguments
        value = "" if key not in _EARLY_KEYS else (yield from collect_json_value(output, *ends))
        if key in _ARGUMENT_KEYS:
            arguments = value
        yield from output.skip()
        if not value or not (yield from output.accept(",")):
            break
    return None, ""


def _emit_arguments(output: ModelOutput, ends: tuple[str, ...]) -> Parse[bool]:
    """Read members up to the arguments, and emit these. Returns whether there were any."""
    while (yield from _next_member(output)) and (key := (yield from _key(output))) is not None:
        if key in _ARGUMENT_KEYS:
            return (yield from emit_json_value(output, output.arguments, *ends))
        yield from collect_json_value(output, *ends)
    return False


def _skip_members(output: ModelOutput, ends: tuple[str, ...]) -> Parse[None]:
    """Read past the rest of the object."""
    while (yield from _next_member(output)) and (yield from _key(output)) is not None:
        yield from collect_json_value(output, *ends)


def _next_member(output: ModelOutput) -> Parse[bool]:
    """Read the comma before another member or the object's end; return whether it was a comma."""
    yield from output.skip()
    return (yield from output.accept(",", "}")) == ","


def _key(output: ModelOutput) -> Parse[str | None]:
    """Read a member's key and the colon; None if there is none."""
    yield from output.skip()
    key = yield from json_string(output)
    yield from output.skip()
    if key is None or not (yield from output.accept(":")):
        return None
    yield from output.skip()
    return key
