"""Tool calls that an opening marker sets apart from the content."""

from __future__ import annotations

from collections.abc import Callable

from ..deltas import ContentDelta
from ..model_output import ModelOutput, Parse

# Reads what follows an opening marker. Returns False, with nothing read, if it is no tool call.
ReadCalls = Callable[[ModelOutput], Parse[bool]]


def content_and_calls(output: ModelOutput, read_calls: ReadCalls, *openings: str) -> Parse[None]:
    """Read the whole text: content, and tool calls after each opening marker.

    White space around tool calls is left out. A marker that no tool call follows is content.
    """
    while opening := (yield from output.content_until(*openings)):
        before = output.trimmed
        if (yield from read_calls(output)):
            yield from output.skip()
        else:
            yield ContentDelta(before + opening)
