"""Tool calls that markers set apart from the content."""

from __future__ import annotations

from collections.abc import Callable

from ..deltas import ContentDelta, ToolCallStart
from ..json_call import emit_json_value
from ..model_output import ModelOutput, Parse

# Reads what follows an opening marker, its second argument. Returns False, with nothing read, if it is no tool call.
ReadCalls = Callable[[ModelOutput, str], Parse[bool]]
# Reads up to the arguments of a call and returns its beginning; None if there is no further call.
ReadStart = Callable[[ModelOutput], Parse[ToolCallStart | None]]


def content_and_calls(output: ModelOutput, read_calls: ReadCalls, *openings: str) -> Parse[None]:
    """Read the whole text: content, and tool calls after each opening marker.

    White space around tool calls is left out. A marker that no tool call follows is content.
    """
    while opening := (yield from output.content_until(*openings)):
        before = output.trimmed
        if (yield from read_calls(output, opening)):
            yield from output.skip()
        else:
            yield ContentDelta(before + opening)


def section_of_calls(
    output: ModelOutput, read_start: ReadStart, end_call: str, end_section: str
) -> Parse[bool]:
    """Read calls, each with its end marker, up to the end of their section. Returns False if there is none."""
    output.bookmark()
    start = yield from read_start(output)
    if start is None:
        output.rewind()
        return False
    output.commit()
    while start is not None:
        yield start
        yield from output.skip()
        if not (yield from emit_json_value(output, output.arguments, end_call, end_section)):
            yield output.arguments("{}")
        _, marker = yield from output.text_until(end_call, end_section)
        if marker != end_call:
            return True
        start = yield from read_start(output)
    yield from output.skip()
    yield from output.accept(end_section)
    return True
