"""DeepSeek V3, R1 and V3.1: a section of calls between special tokens.

V3 and R1 write ``function<sep>NAME`` and the arguments as a block of Markdown, V3.1 ``NAME<sep>ARGUMENTS``.
"""

from __future__ import annotations

from ..deltas import ToolCallStart
from ..model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from .marked import content_and_calls, section_of_calls

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKERS = _BEGIN, _END, _CALL, _END_CALL, _SEP


def deepseek_v3(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _read_v3, _BEGIN)


def deepseek_v31(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _read_v31, _BEGIN)


def _read_v3(output: ModelOutput, opening: str) -> Parse[bool]:
    return section_of_calls(output, _start_v3, _END_CALL, _END)


def _read_v31(output: ModelOutput, opening: str) -> Parse[bool]:
    return section_of_calls(output, _start_v31, _END_CALL, _END)


def _start_v3(output: ModelOutput) -> Parse[ToolCallStart | None]:
    kind = yield from _text_before_sep(output)
    if kind is None:
        return None
    name, _ = yield from output.text_until("\n", _END_CALL, max_chars=MAX_HEADER_CHARS)
    yield from output.skip()
    yield from output.accept("```json")
    return output.start_call(name.strip()) if name.strip() else None


def _start_v31(output: ModelOutput) -> Parse[ToolCallStart | None]:
    name = yield from _text_before_sep(output)
    return output.start_call(name) if name else None


def _text_before_sep(output: ModelOutput) -> Parse[str | None]:
    yield from output.skip()
    if not (yield from output.accept(_CALL)):
        return None
    text, marker = yield from output.text_until(_SEP, max_chars=MAX_HEADER_CHARS)
    return None if marker is None else text.strip()
