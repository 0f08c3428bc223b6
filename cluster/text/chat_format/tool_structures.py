"""Structures of tool calls: the texts around the arguments of each call, as structural tags for grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Format = Mapping[str, Any]  # a format of xgrammar's structural tags

# In a JSON schema's format: the schema is applied as far as the library does, see worker.structured.
LENIENT = "x-quire-lenient"
_NUMBER: Format = {"type": "regex", "pattern": "[0-9]{1,3}"}
# Without a schema, or with one that only allows an empty object, the arguments are any object.
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class FunctionSchema:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; empty for any object.
        is_strict: the arguments must be valid; otherwise the schema is applied as far as possible.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolStructure:
    """The texts of a reply that consists of tool calls.

    Attributes:
        begin, end: before and after the arguments of each call. ``{name}`` stands for the function's name, and
            ``{number}`` for any number.
        separator: the text between two calls.
        prefix, suffix: before the first and after the last call.
        trigger: text that begins a call, or the calls, within other text; empty if calls are the whole reply.
        style: how the arguments are written, a style of xgrammar.
    """

    begin: str
    end: str
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    style: str = "json"

    def calls(self, functions: Sequence[FunctionSchema], *, allows_parallel_calls: bool) -> Format:
        """Return the format of a reply with at least one call of these functions and nothing else."""
        call = _any_of([self._call(function) for function in functions])
        more = {"type": "star", "content": _sequence(_const(self.separator), call)}
        return _sequence(
            _const(self.prefix), call, *([more] if allows_parallel_calls else []), _const(self.suffix)
        )

    def calls_in_text(self, functions: Sequence[FunctionSchema], *, allows_parallel_calls: bool) -> Format:
        """Return the format of text with any number of calls. Needs a trigger."""
        calls = self.calls(functions, allows_parallel_calls=allows_parallel_calls and bool(self.prefix))
        return {
            "type": "dispatch",
            "rules": [(self.trigger, _without_prefix(calls, self.trigger))],
            "loop": allows_parallel_calls,
        }

    def _call(self, function: FunctionSchema) -> Format:
        schema: dict[str, Any] = {
            "type": "json_schema",
            "json_schema": function.parameters or _ANY_OBJECT,
            "style": self.style,
        }
        if not function.is_strict:
            schema[LENIENT] = True
        before = self.begin.replace("{name}", function.name).split("{number}")
        header = [_const(before[0])]
        for text in before[1:]:
            header += [_NUMBER, _const(text)]
        return _sequence(*header, schema, _const(self.end))


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Format) -> Format:
    """Return the elements one after the other, without empty texts and nested sequences."""
    flat: list[Format] = []
    for element in elements:
        if element["type"] == "sequence":
            flat += element["elements"]
        elif element.get("value") != "":
            flat.append(element)
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def _any_of(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _without_prefix(form: Format, prefix: str) -> Format:
    """Return the format of what follows a text with which every string of the format begins."""
    if form["type"] == "or":
        return _any_of([_without_prefix(each, prefix) for each in form["elements"]])
    if form["type"] == "const_string":
        return _const(form["value"].removeprefix(prefix))
    first, *others = form["elements"]
    return _sequence(_without_prefix(first, prefix), *others)
