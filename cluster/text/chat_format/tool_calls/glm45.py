"""GLM-4.5: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`` per call."""

from __future__ import annotations

import re

from ..model_output import ModelOutput, Parse
from ..typed_arguments import emit_text_argument, types_of
from .marked import content_and_calls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKERS = _OPEN, _CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE

_NAME = re.compile(r"\s*([^\s<>{}]+)\s*(?=<)")


def glm45(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _call, _OPEN)


def _call(output: ModelOutput, opening: str) -> Parse[bool]:
    found = yield from output.match(_NAME)
    if found is None:
        return False
    name, is_first = found[1], True
    yield output.start_call(name)
    _, marker = yield from output.text_until(_KEY, _CLOSE)
    while marker == _KEY:
        key, marker = yield from output.text_until(_END_KEY, _CLOSE)
        if marker == _END_KEY:
            _, marker = yield from output.text_until(_VALUE, _CLOSE)
        if marker == _VALUE:
            types = types_of(output.tools.get(name, {}), key.strip())
            marker = yield from emit_text_argument(output, key.strip(), is_first, types, _END_VALUE, _CLOSE)
            is_first = False
        if marker == _END_VALUE:
            _, marker = yield from output.text_until(_KEY, _CLOSE)
    if marker is not None:
        yield output.arguments("{}" if is_first else "}")
    return True
