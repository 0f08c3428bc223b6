"""Reasoning before the reply, between an opening and a closing tag. The prompt may end with either of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from . import harmony
from .deltas import ContentDelta, ReasoningDelta
from .model_output import ModelOutput, Parse
from .tool_format import ToolCallFormat

_NEWLINES = "\r\n"


class ReasoningStart(enum.Enum):
    """State in which the prompt leaves the model."""

    OPEN = "open"  # after the opening tag
    CLOSED = "closed"  # after the closing tag: the model replies without reasoning
    UNKNOWN = "unknown"  # the model writes the opening tag, or replies at once


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of reasoning.

    Attributes:
        start_tags, end_tags: the forms of each tag, no one the beginning of another.
        wrappers: texts around the reply, which are left out of it.
        is_implied: a model that writes no opening tag reasons all the same.
        is_content: the reasoning stays in the content, with its tags.
        shown_by: a chat template with all texts of one of these entries writes the format.
        models: models that write the format, for the documentation.
    """

    start_tags: tuple[str, ...] = ("<think>",)
    end_tags: tuple[str, ...] = ("</think>",)
    wrappers: tuple[str, ...] = ()
    is_implied: bool = False
    is_content: bool = False
    shown_by: Sequence[tuple[str, ...]] = ()
    models: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the format depends on, which may be special tokens."""
        return *self.start_tags, *self.end_tags, *self.wrappers

    def start(self, prompt: str) -> ReasoningStart:
        """Return the state after a rendered prompt."""
        end = prompt.rstrip()
        if end.endswith(tuple(text.rstrip() for text in self.end_tags)):
            return ReasoningStart.CLOSED
        if end.endswith(tuple(text.rstrip() for text in self.start_tags)) or self.is_implied:
            return ReasoningStart.OPEN
        return ReasoningStart.UNKNOWN

    def read(
        self, output: ModelOutput, start: ReasoningStart, tool_calls: ToolCallFormat | None = None
    ) -> Parse[None]:
        """Read the reasoning with its tags, without the line breaks around them.

        A tool call within it ends it, too: models leave out the closing tag.
        """
        output.wrappers = self.wrappers
        if start is ReasoningStart.CLOSED:
            return
        if self.is_content:
            if start is ReasoningStart.OPEN:
                yield ContentDelta(self.start_tags[0])
            return
        output.bookmark()
        yield from output.skip()
        if not (yield from output.accept(*self.start_tags)) and start is ReasoningStart.UNKNOWN:
            output.rewind()
            return
        output.commit()
        output.begin_reasoning()
        yield from output.skip(_NEWLINES)
        tags = () if tool_calls is None else tool_calls.tags
        while True:
            marker = yield from output.emit_until(ReasoningDelta, *self.end_tags, *tags, trim=_NEWLINES)
            if tool_calls is None or marker not in tags:
                break
            before = output.trimmed
            if (yield from tool_calls.read_calls(output, marker)):
                yield from output.skip()
                return
            yield ReasoningDelta(before + marker)
        output.end_reasoning(marker)
        yield from output.skip(_NEWLINES)


@dataclass(frozen=True, slots=True)
class HarmonyReasoning(ReasoningFormat):
    """Reasoning in a channel of its own; its parser reads the whole text."""

    start_tags: tuple[str, ...] = ()
    end_tags: tuple[str, ...] = (harmony.FINAL_MESSAGE,)

    @property
    def markers(self) -> tuple[str, ...]:
        return harmony.MARKERS

    def start(self, prompt: str) -> ReasoningStart:
        return ReasoningStart.UNKNOWN

    def read(
        self, output: ModelOutput, start: ReasoningStart, tool_calls: ToolCallFormat | None = None
    ) -> Parse[None]:
        return harmony.harmony(output)
