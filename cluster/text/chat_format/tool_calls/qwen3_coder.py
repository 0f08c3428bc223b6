"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`` per call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from ..typed_arguments import emit_text_argument, types_of
from .marked import content_and_calls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
MARKERS = _OPEN, _CLOSE

# A line break on either side of a value is not part of it. Models leave out closing tags.
_VALUE_ENDS = tuple(
    prefix + end for end in (_END_PARAMETER, _PARAMETER, _END_FUNCTION, _CLOSE) for prefix in ("\n", "")
)


def qwen3_coder(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _call, _OPEN, _FUNCTION)


def _call(output: ModelOutput, opening: str) -> Parse[bool]:
    output.bookmark()
    if opening == _OPEN:
        yield from output.skip()
        if not (yield from output.accept(_FUNCTION)):
            output.rewind()
            return False
    name, end = yield from output.text_until(">", max_chars=MAX_HEADER_CHARS)
    if end is None or not name.strip():
        output.rewind()
        return False
    output.commit()
    yield output.start_call(name.strip())
    end = yield from _parameters(output, output.tools.get(name.strip(), {}))
    if end != _CLOSE and end is not None:
        yield from output.skip()
        yield from output.accept(_CLOSE)
    return True


def _parameters(output: ModelOutput, schema: Mapping[str, Any]) -> Parse[str | None]:
    """Read the parameters; return the marker that ended them, None at the end of the text."""
    is_first = True
    marker: str | None = _END_PARAMETER
    while marker in (_END_PARAMETER, _PARAMETER):
        if marker == _END_PARAMETER:
            _, marker = yield from output.text_until(_PARAMETER, _END_FUNCTION, _CLOSE)
        if marker != _PARAMETER:
            break
        name, end = yield from output.text_until(">", max_chars=MAX_HEADER_CHARS)
        if end is None:  # no parameter after all
            marker = _END_PARAMETER
            continue
        yield from output.accept("\n")
        types = types_of(schema, name)
        end = yield from emit_text_argument(output, name, is_first, types, *_VALUE_ENDS)
        is_first, marker = False, None if end is None else end.lstrip("\n")
    if marker is not None:
        yield output.arguments("{}" if is_first else "}")
    return marker
