"""Structures of tool calls: the texts around the arguments of each call, as structural tags for grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Format = Mapping[str, Any]  # a format of xgrammar's structural tags

# In a JSON schema's format: the schema is applied as far as the library does, see worker.structured.
LENIENT = "x-quire-lenient"
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
    """The texts of a reply that consists of tool calls. ``{name}`` stands for the function's name.

    Attributes:
        begin, end: before and after the arguments of each call.
        separator: between two calls.
        prefix, suffix: before the first and after the last call.
        trigger: text that begins a call, or the calls, within other text; empty if calls are the whole reply.
        style: how the arguments are written, a style of xgrammar.
        number: a regular expression between `begin` and `arguments`; empty for none.
        arguments: text before the arguments, after `number`.
    """

    begin: str
    end: str
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    style: str = "json"
    number: str = ""
    arguments: str = ""

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
        number = [{"type": "regex", "pattern": self.number}] if self.number else []
        begin, end = (text.replace("{name}", function.name) for text in (self.begin, self.end))
        return _sequence(_const(begin), *number, _const(self.arguments), schema, _const(end))


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


_HERMES = ToolStructure(
    '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"
)
_QWEN_CODER = ToolStructure(
    "<tool_call>\n<function={name}>\n",
    "</function>\n</tool_call>",
    "\n",
    trigger="<tool_call>",
    style="qwen_xml",
)
_LLAMA_JSON = ToolStructure('{"name": "{name}", "parameters": ', "}", "; ")
_DEEPSEEK_CALL, _DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_SECTION = {
    "prefix": "<｜tool▁calls▁begin｜>",
    "suffix": "<｜tool▁calls▁end｜>",
    "trigger": "<｜tool▁calls▁begin｜>",
}

# Name of a format in `registry` |-> its structure. Formats without one cannot be forced.
TOOL_STRUCTURES: Mapping[str, ToolStructure] = {
    "deepseek_v3": ToolStructure(
        f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}{{name}}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        **_DEEPSEEK_SECTION,
    ),
    "deepseek_v31": ToolStructure(
        f"{_DEEPSEEK_CALL}{{name}}{_DEEPSEEK_SEP}", "<｜tool▁call▁end｜>", **_DEEPSEEK_SECTION
    ),
    "glm45": ToolStructure(
        "<tool_call>{name}\n", "</tool_call>", "\n", trigger="<tool_call>", style="glm_xml"
    ),
    "granite": ToolStructure(
        '{"name": "{name}", "arguments": ', "}", ", ", "<|tool_call|>[", "]", trigger="<|tool_call|>"
    ),
    "hermes": _HERMES,
    "kimi_k2": ToolStructure(
        "<|tool_call_begin|>functions.{name}:",
        "<|tool_call_end|>",
        prefix="<|tool_calls_section_begin|>",
        suffix="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
        number="[0-9]{1,3}",
        arguments="<|tool_call_argument_begin|>",
    ),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "mistral": ToolStructure(
        '{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]"
    ),
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
}
