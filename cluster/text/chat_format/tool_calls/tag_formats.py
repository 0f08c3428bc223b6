"""Formats whose calls have a tag for each argument, the most specific first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from ..tool_structures import ToolStructure
from ..typed_arguments import emit_text_argument, types_of
from .tool_format import ToolCallFormat, content_and_calls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

_GLM_KEY, _GLM_END_KEY, _GLM_VALUE, _GLM_END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_GLM_NAME = re.compile(r"\s*([^\s<>{}]+)\s*(?=<)")

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
# A line break on either side of a value is not part of it. Models leave out closing tags.
_VALUE_ENDS = tuple(
    prefix + end for end in (_END_PARAMETER, _PARAMETER, _END_FUNCTION, _CLOSE) for prefix in ("\n", "")
)


def _glm_call(output: ModelOutput, opening: str) -> Parse[bool]:
    found = yield from output.match(_GLM_NAME)
    if found is None:
        return False
    name, is_first = found[1], True
    yield output.start_call(name)
    _, marker = yield from output.text_until(_GLM_KEY, _CLOSE)
    while marker == _GLM_KEY:
        key, marker = yield from output.text_until(_GLM_END_KEY, _CLOSE)
        if marker == _GLM_END_KEY:
            _, marker = yield from output.text_until(_GLM_VALUE, _CLOSE)
        if marker == _GLM_VALUE:
            types = types_of(output.tools.get(name, {}), key.strip())
            marker = yield from emit_text_argument(
                output, key.strip(), is_first, types, _GLM_END_VALUE, _CLOSE
            )
            is_first = False
        if marker == _GLM_END_VALUE:
            _, marker = yield from output.text_until(_GLM_KEY, _CLOSE)
    if marker is not None:
        yield output.arguments("{}" if is_first else "}")
    return True


def _qwen_call(output: ModelOutput, opening: str) -> Parse[bool]:
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


FORMATS: Mapping[str, ToolCallFormat] = {
    # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call> for each call
    "glm45": ToolCallFormat(
        content_and_calls(_glm_call, _OPEN),
        (_OPEN, _CLOSE, _GLM_KEY, _GLM_END_KEY, _GLM_VALUE, _GLM_END_VALUE),
        ToolStructure(f"{_OPEN}{{name}}\n", _CLOSE, "\n", trigger=_OPEN, style="glm_xml"),
        shown_by=[(_GLM_KEY,)],
    ),
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call> for each call
    "qwen3_coder": ToolCallFormat(
        content_and_calls(_qwen_call, _OPEN, _FUNCTION),
        (_OPEN, _CLOSE),
        ToolStructure(
            f"{_OPEN}\n{_FUNCTION}{{name}}>\n",
            f"{_END_FUNCTION}\n{_CLOSE}",
            "\n",
            trigger=_OPEN,
            style="qwen_xml",
        ),
        shown_by=[(_OPEN, _FUNCTION, _PARAMETER)],
    ),
}
