"""Reasoning before the reply, between an opening and a closing tag. The prompt may end with either of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .deltas import ReasoningDelta
from .model_output import ModelOutput, Parse

_NEWLINES = "\r\n"


class ReasoningStart(enum.Enum):
    """State in which the prompt leaves the model."""

    OPEN = "open"  # after the opening tag
    CLOSED = "closed"  # after the closing tag: the model replies without reasoning
    UNKNOWN = "unknown"  # the model writes the opening tag, or replies at once


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Tags of a model's reasoning.

    Attributes:
        start_tags, end_tags: the forms of each tag, no one the beginning of another.
        is_implied: a model that writes no opening tag reasons all the same.
    """

    start_tags: tuple[str, ...]
    end_tags: tuple[str, ...]
    is_implied: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return *self.start_tags, *self.end_tags

    def start(self, prompt: str) -> ReasoningStart:
        """Return the state after a rendered prompt."""
        end = prompt.rstrip()
        if end.endswith(self.end_tags):
            return ReasoningStart.CLOSED
        if end.endswith(self.start_tags) or self.is_implied:
            return ReasoningStart.OPEN
        return ReasoningStart.UNKNOWN

    def read(self, output: ModelOutput, start: ReasoningStart) -> Parse[None]:
        """Read the reasoning with its tags, without the line breaks around them."""
        if start is ReasoningStart.CLOSED:
            return
        output.bookmark()
        yield from output.skip()
        if not (yield from output.accept(*self.start_tags)) and start is ReasoningStart.UNKNOWN:
            output.rewind()
            return
        output.commit()
        output.begin_reasoning()
        yield from output.skip(_NEWLINES)
        closing = yield from output.emit_until(ReasoningDelta, *self.end_tags, trim=_NEWLINES)
        output.end_reasoning(closing)
        yield from output.skip(_NEWLINES)
