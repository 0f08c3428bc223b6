"""ToolCallFormat, and readers of tool calls that markers set apart from the content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..deltas import ContentDelta, ToolCallStart
from ..json_call import emit_json_value
from ..model_output import ModelOutput, Parse
from ..output_parser import new_call_id
from ..tool_structures import ToolStructure

# Reads content and tool calls up to the end of the text.
Read = Callable[[ModelOutput], Parse[None]]
# Reads what follows an opening marker, its second argument. Returns False, with nothing read, if it is no tool call.
ReadCalls = Callable[[ModelOutput, str], Parse[bool]]
# Reads up to the arguments of a call and returns its beginning; None if there is no further call.
ReadStart = Callable[[ModelOutput], Parse[ToolCallStart | None]]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format of tool calls.

    Attributes:
        markers: texts that the format depends on, which may be special tokens.
        structure: texts around the arguments, for grammars; None if no grammar can force the format.
        shown_by: a chat template with all texts of one of these entries writes the format.
        new_id: returns the id of a call for which the model wrote none.
    """

    read: Read
    markers: tuple[str, ...]
    structure: ToolStructure | None = None
    shown_by: Sequence[tuple[str, ...]] = ()
    new_id: Callable[[], str] = new_call_id


def content_and_calls(read_calls: ReadCalls, *openings: str) -> Read:
    """Return a reader of content, and of tool calls after each opening marker.

    White space around tool calls is left out. A marker that no tool call follows is content.
    """

    def read(output: ModelOutput) -> Parse[None]:
        while opening := (yield from output.content_until(*openings)):
            before = output.trimmed
            if (yield from read_calls(output, opening)):
                yield from output.skip()
            else:
                yield ContentDelta(before + opening)

    return read


def section_of_calls(read_start: ReadStart, end_call: str, end_section: str) -> ReadCalls:
    """Return a reader of calls, each with its end marker, up to the end of their section."""

    def read(output: ModelOutput, opening: str) -> Parse[bool]:
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

    return read
