"""Formats whose calls have JSON arguments, the most specific first.

A further one takes a reader, mostly one of those here, and an entry of FORMATS.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping

from ..deltas import ContentDelta, ToolCallStart
from ..json_call import accept_all, emit_json_value, json_call, json_calls
from ..model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from ..tool_structures import ToolStructure
from .tool_format import ReadCalls, ToolCallFormat, content_and_calls, section_of_calls

_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_MARKERS = _DEEPSEEK_BEGIN, _DEEPSEEK_END, _DEEPSEEK_CALL, _DEEPSEEK_END_CALL, _DEEPSEEK_SEP

_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)

_LLAMA_TAGS = "<|python_tag|>", "<|python_start|>"
_LLAMA_END = "<|python_end|>"

_MISTRAL_CALLS, _MISTRAL_CALL_ID, _MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?=[\[{])")
_MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits


def _call_before(close: str) -> ReadCalls:
    """Return a reader of one call, ``{"name": ..., "arguments": {...}}``, and of a marker after it."""

    def read(output: ModelOutput, opening: str) -> Parse[bool]:
        if not (yield from json_call(output, close)):
            return False
        yield from output.text_until(close)
        return True

    return read


def _list_before(close: str) -> ReadCalls:
    """Return a reader of a JSON list of calls, and of a marker that may follow it."""

    def read(output: ModelOutput, opening: str) -> Parse[bool]:
        if not (yield from json_calls(output, close)):
            return False
        yield from output.skip()
        yield from output.accept(close)
        return True

    return read


def _deepseek_v3_start(output: ModelOutput) -> Parse[ToolCallStart | None]:
    """Read ``function<sep>NAME`` and the beginning of a block of Markdown."""
    kind = yield from _text_before_sep(output)
    if kind is None:
        return None
    name, _ = yield from output.text_until("\n", _DEEPSEEK_END_CALL, max_chars=MAX_HEADER_CHARS)
    yield from output.skip()
    yield from output.accept("```json")
    return output.start_call(name.strip()) if name.strip() else None


def _deepseek_v31_start(output: ModelOutput) -> Parse[ToolCallStart | None]:
    """Read ``NAME<sep>``."""
    name = yield from _text_before_sep(output)
    return output.start_call(name) if name else None


def _text_before_sep(output: ModelOutput) -> Parse[str | None]:
    yield from output.skip()
    if not (yield from output.accept(_DEEPSEEK_CALL)):
        return None
    text, marker = yield from output.text_until(_DEEPSEEK_SEP, max_chars=MAX_HEADER_CHARS)
    return None if marker is None else text.strip()


def _kimi_start(output: ModelOutput) -> Parse[ToolCallStart | None]:
    """Read ``functions.NAME:NUMBER``, which is the call's id."""
    yield from output.skip()
    if not (yield from output.accept(_KIMI_CALL)):
        return None
    text, _ = yield from output.text_until(_KIMI_ARGUMENTS, max_chars=MAX_HEADER_CHARS)
    call_id = text.strip()
    found = _KIMI_ID.fullmatch(call_id)
    return None if found is None else output.start_call(found[1], call_id)


def _mistral_calls(output: ModelOutput, opening: str) -> Parse[bool]:
    """Read a JSON list of calls, or since v11 of Mistral's tokenizer ``NAME[ARGS]{...}`` for each call."""
    if (yield from json_calls(output, _MISTRAL_CALLS)):
        return True
    found = yield from output.match(_MISTRAL_NAME)
    if found is None:
        return False
    call_id = ""
    if (yield from output.accept(_MISTRAL_CALL_ID)):
        call_id, _ = yield from output.text_until(_MISTRAL_ARGS, max_chars=MAX_HEADER_CHARS)
    else:
        yield from output.accept(_MISTRAL_ARGS)
    yield output.start_call(found[1], call_id.strip())
    yield from output.skip()
    if not (yield from emit_json_value(output, output.arguments, _MISTRAL_CALLS)):
        yield output.arguments("{}")
    return True


def new_mistral_id() -> str:
    """Return a random id of nine letters and digits, which Mistral's templates demand."""
    return "".join(random.choices(_MISTRAL_ID_CHARACTERS, k=9))


def _llama3_json(output: ModelOutput) -> Parse[None]:
    """Read calls at the beginning of the text, separated by semicolons.

    Without a tag, only functions that the request offers are called.
    """
    output.bookmark()
    yield from output.skip()
    tag = yield from output.accept(*_LLAMA_TAGS)
    accepts = accept_all if tag else output.tools.__contains__
    if not (yield from json_call(output, _LLAMA_END, accepts=accepts)):
        output.rewind()
        yield from output.emit_until(ContentDelta)
        return
    output.commit()
    has_more = True
    while has_more:
        yield from output.skip("; \t\r\n")
        yield from output.accept(*_LLAMA_TAGS, _LLAMA_END)
        has_more = yield from json_call(output, _LLAMA_END, accepts=accepts)
    yield from output.emit_until(ContentDelta)


FORMATS: Mapping[str, ToolCallFormat] = {
    "kimi_k2": ToolCallFormat(
        content_and_calls(section_of_calls(_kimi_start, _KIMI_END_CALL, _KIMI_END), _KIMI_BEGIN),
        (_KIMI_BEGIN, _KIMI_END, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END_CALL),
        ToolStructure(
            f"{_KIMI_CALL}functions.{{name}}:",
            _KIMI_END_CALL,
            prefix=_KIMI_BEGIN,
            suffix=_KIMI_END,
            trigger=_KIMI_BEGIN,
            number="[0-9]{1,3}",
            arguments=_KIMI_ARGUMENTS,
        ),
        shown_by=[(_KIMI_BEGIN,)],
    ),
    "deepseek_v3": ToolCallFormat(
        content_and_calls(
            section_of_calls(_deepseek_v3_start, _DEEPSEEK_END_CALL, _DEEPSEEK_END), _DEEPSEEK_BEGIN
        ),
        _DEEPSEEK_MARKERS,
        ToolStructure(
            f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}{{name}}\n```json\n",
            f"\n```{_DEEPSEEK_END_CALL}",
            "\n",
            prefix=_DEEPSEEK_BEGIN,
            suffix=_DEEPSEEK_END,
            trigger=_DEEPSEEK_BEGIN,
        ),
        shown_by=[(_DEEPSEEK_BEGIN, "```json")],
    ),
    "deepseek_v31": ToolCallFormat(
        content_and_calls(
            section_of_calls(_deepseek_v31_start, _DEEPSEEK_END_CALL, _DEEPSEEK_END), _DEEPSEEK_BEGIN
        ),
        _DEEPSEEK_MARKERS,
        ToolStructure(
            f"{_DEEPSEEK_CALL}{{name}}{_DEEPSEEK_SEP}",
            _DEEPSEEK_END_CALL,
            prefix=_DEEPSEEK_BEGIN,
            suffix=_DEEPSEEK_END,
            trigger=_DEEPSEEK_BEGIN,
        ),
        shown_by=[(_DEEPSEEK_BEGIN,)],
    ),
    "mistral": ToolCallFormat(
        content_and_calls(_mistral_calls, _MISTRAL_CALLS),
        (_MISTRAL_CALLS, _MISTRAL_CALL_ID, _MISTRAL_ARGS),
        ToolStructure(
            '{"name": "{name}", "arguments": ',
            "}",
            ", ",
            f"{_MISTRAL_CALLS}[",
            "]",
            trigger=_MISTRAL_CALLS,
        ),
        shown_by=[(_MISTRAL_CALLS,)],
        new_id=new_mistral_id,
    ),
    "granite": ToolCallFormat(
        content_and_calls(_list_before("</tool_call>"), "<|tool_call|>", "<tool_call>"),
        ("<|tool_call|>", "</tool_call>"),
        ToolStructure(
            '{"name": "{name}", "arguments": ', "}", ", ", "<|tool_call|>[", "]", trigger="<|tool_call|>"
        ),
        shown_by=[("<|tool_call|>",)],
    ),
    "hermes": ToolCallFormat(
        content_and_calls(_call_before("</tool_call>"), "<tool_call>"),
        ("<tool_call>", "</tool_call>"),
        ToolStructure(
            '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"
        ),
        shown_by=[("<tool_call>",)],
    ),
    "llama3_json": ToolCallFormat(
        _llama3_json,
        (*_LLAMA_TAGS, _LLAMA_END),
        ToolStructure('{"name": "{name}", "parameters": ', "}", "; "),
        shown_by=[('"name": function name, "parameters"',), ("<|python_tag|>",)],
    ),
}
