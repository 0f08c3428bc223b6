"""Kimi K2: a section of calls, each ``functions.NAME:NUMBER`` and its arguments, between special tokens."""

from __future__ import annotations

import re

from ..deltas import ToolCallStart
from ..model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from .marked import content_and_calls, section_of_calls

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = _BEGIN, _END, _CALL, _ARGUMENTS, _END_CALL

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def kimi_k2(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _calls, _BEGIN)


def _calls(output: ModelOutput, opening: str) -> Parse[bool]:
    return section_of_calls(output, _start, _END_CALL, _END)


def _start(output: ModelOutput) -> Parse[ToolCallStart | None]:
    yield from output.skip()
    if not (yield from output.accept(_CALL)):
        return None
    text, _ = yield from output.text_until(_ARGUMENTS, max_chars=MAX_HEADER_CHARS)
    call_id = text.strip()
    found = _ID.fullmatch(call_id)
    return None if found is None else output.start_call(found[1], call_id)
