"""ModelOutput: a completion's text that arrives in pieces, read by grammars that are written as if it were whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from .deltas import ChatDelta, ContentDelta, ToolCallArguments, ToolCallStart

T = TypeVar("T")

# Part of a grammar: yields deltas, and None where it needs more text; returns a value of its own.
Parse = Generator[ChatDelta | None, None, T]
# Bounds the text that is held back until it is clear if a tool call begins.
MAX_HEADER_CHARS = 1024

_WHITESPACE = " \t\r\n"


class ModelOutput:
    """Text of one completion with a read position.

    A grammar is a generator over it. It reads with `yield from`, yields deltas, and is suspended while the text that
    it needs has not arrived. No method's result depends on how the text is split into pieces.

    Args:
        tools: name |-> JSON schema of the parameters, of the functions that the request offers.
        new_call_id: returns the id of a call for which the model wrote none.

    Attributes:
        tools: the functions as the caller gave them.
        is_complete: the whole text has arrived.
        num_calls: tool calls so far.
        trimmed: characters that `emit_until` left out before the marker that it returned last.
        wrappers: texts around the reply, which are no part of it.
        reasoning: parts of the text that are reasoning, as (start, end) of `position`; the end is None in a part
            that is being read. A reader may drop those that it has seen.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_call_id: Callable[[], str]) -> None:
        self.tools = tools
        self.is_complete = False
        self.num_calls = 0
        self.trimmed = ""
        self.wrappers: tuple[str, ...] = ()
        self.reasoning: list[tuple[int, int | None]] = []
        self._new_call_id = new_call_id
        self._text = ""
        self._pos = 0
        self._num_dropped = 0  # characters before `_text`
        self._bookmarks: list[int] = []

    def push(self, text: str) -> None:
        """Append text, and drop what has been read and cannot be returned to."""
        start = self._bookmarks[0] if self._bookmarks else self._pos
        self._text = self._text[start:] + text
        self._num_dropped += start
        self._pos -= start
        self._bookmarks = [at - start for at in self._bookmarks]

    @property
    def position(self) -> int:
        """Number of characters that have been read for good."""
        return self._num_dropped + (self._bookmarks[0] if self._bookmarks else self._pos)

    def begin_reasoning(self) -> None:
        """Mark the beginning of reasoning, at the position."""
        self.reasoning.append((self.position, None))

    def end_reasoning(self, marker: str | None) -> None:
        """Mark the end of the reasoning that was begun, before the marker that was read last."""
        start, _ = self.reasoning.pop()
        self.reasoning.append((start, self.position - len(marker or "")))

    def start_call(self, name: str, call_id: str = "") -> ToolCallStart:
        """Return the beginning of the next tool call, with a new id unless the model wrote one.

        A call within reasoning ends the reasoning at the position.
        """
        if self.reasoning and self.reasoning[-1][1] is None:
            self.end_reasoning(None)
        self.num_calls += 1
        return ToolCallStart(self.num_calls - 1, call_id or self._new_call_id(), name)

    def arguments(self, text: str) -> ToolCallArguments:
        """Return a piece of the arguments of the tool call that was started last."""
        return ToolCallArguments(self.num_calls - 1, text)

    def bookmark(self) -> None:
        """Remember the position for `rewind` or `commit`, which belong to the latest bookmark."""
        self._bookmarks.append(self._pos)

    def unread(self, text: str) -> None:
        """Return to the position before a text that was read last, without any other step in between."""
        self._pos -= len(text)

    def rewind(self) -> None:
        """Return to the latest bookmark and drop it."""
        self._pos = self._bookmarks.pop()

    def commit(self) -> None:
        """Drop the latest bookmark: what follows it is read for good."""
        self._bookmarks.pop()

    def emit_until(
        self, make: Callable[[str], ChatDelta], *markers: str, trim: str = ""
    ) -> Parse[str | None]:
        """Emit the text before the first of the markers; read and return the marker. None at the end of the text.

        Args:
            make: makes a delta of a piece of text.
            markers: none may be the beginning of another.
            trim: characters that are left out directly before a marker.
        """
        while True:
            start, marker = self._find(markers)
            if marker is not None:
                piece = self._text[self._pos : start].rstrip(trim)
                self.trimmed = self._text[self._pos + len(piece) : start]
                self._pos = start + len(marker)
            else:
                end = len(self._text) if self.is_complete else self._end_of_certain(markers)
                piece = self._text[self._pos : end]
                if trim and not self.is_complete:
                    piece = piece.rstrip(trim)
                self._pos += len(piece)
            if piece:
                yield make(piece)
            if marker is not None:
                return marker
            if self.is_complete:
                return None
            yield None

    def content_until(self, *markers: str) -> Parse[str | None]:
        """Emit content until a marker, without white space directly before it. See `emit_until`.

        The texts around the reply are left out.
        """
        while True:
            marker = yield from self.emit_until(ContentDelta, *markers, *self.wrappers, trim=_WHITESPACE)
            if marker is None or marker in markers:
                return marker
            yield from self.skip()

    def text_until(self, *markers: str, max_chars: int | None = None) -> Parse[tuple[str, str | None]]:
        """Return the text before the first marker, and the marker, which is read as well.

        The marker is None at the end of the text, or if there is none within `max_chars`; then nothing is read.
        """
        while True:
            start, marker = self._find(markers)
            length = (len(self._text) if marker is None else start) - self._pos
            if max_chars is not None and length - _longest(markers) >= max_chars:
                return "", None
            if marker is not None:
                text = self._text[self._pos : start]
                if max_chars is not None and len(text) > max_chars:
                    return "", None
                self._pos = start + len(marker)
                return text, marker
            if self.is_complete:
                if max_chars is not None:
                    return "", None
                text, self._pos = self._text[self._pos :], len(self._text)
                return text, None
            yield None

    def skip(self, characters: str = _WHITESPACE) -> Parse[None]:
        """Read past these characters."""
        while True:
            rest = self._text[self._pos :]
            stripped = rest.lstrip(characters)
            self._pos += len(rest) - len(stripped)
            if stripped or self.is_complete:
                return
            yield None

    def accept(self, *choices: str) -> Parse[str | None]:
        """Read and return the choice that the text begins with here; None if it begins with none of them.

        If a choice is the beginning of another one, the longer one must come first.
        """
        while True:
            for choice in choices:
                if self._text.startswith(choice, self._pos):
                    self._pos += len(choice)
                    return choice
                length = len(self._text) - self._pos
                if (
                    not self.is_complete
                    and length < len(choice)
                    and choice.startswith(self._text[self._pos :])
                ):
                    break
            else:
                return None
            yield None

    def take(self, characters: re.Pattern[str]) -> Parse[str]:
        """Read and return the longest text of a class of characters; empty if it is over MAX_HEADER_CHARS long.

        Args:
            characters: matches any number of them.
        """
        while True:
            found = characters.match(self._text, self._pos)
            end = self._pos if found is None else found.end()
            if end - self._pos > MAX_HEADER_CHARS:
                return ""
            if end < len(self._text) or self.is_complete:
                text, self._pos = self._text[self._pos : end], end
                return text
            yield None

    def peek(self) -> Parse[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self._pos >= len(self._text) and not self.is_complete:
            yield None
        return self._text[self._pos : self._pos + 1]

    def match(self, pattern: re.Pattern[str]) -> Parse[re.Match[str] | None]:
        """Read and return a match that begins here; None if there is none within MAX_HEADER_CHARS.

        The pattern must end with a character that shows where the match ends.
        """
        while True:
            found = pattern.match(self._text, self._pos, self._pos + MAX_HEADER_CHARS)
            if found is not None:
                self._pos = found.end()
                return found
            if self.is_complete or len(self._text) - self._pos >= MAX_HEADER_CHARS:
                return None
            yield None

    def read(self, num_chars: int) -> str:
        """Read characters that have arrived."""
        text = self._text[self._pos : self._pos + num_chars]
        self._pos += len(text)
        return text

    def arrived(self, *markers: str) -> str:
        """Return the text that has arrived and is certainly before any of the markers."""
        start, marker = self._find(markers)
        if marker is None:
            start = len(self._text) if self.is_complete else self._end_of_certain(markers)
        return self._text[self._pos : start]

    def is_at(self, *markers: str) -> bool:
        """Return whether a marker, or the end of the text, is next; only after `arrived` was read to its end."""
        return self._find(markers)[0] == self._pos or self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """The whole text has been read."""
        return self.is_complete and self._pos == len(self._text)

    def _find(self, markers: tuple[str, ...]) -> tuple[int, str | None]:
        """Return the first marker with its position; None if it has not arrived or an earlier one may still come."""
        found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._pos)) >= 0]
        if not found:
            return -1, None
        start, marker = min(found)
        if not self.is_complete and self._end_of_certain(markers) < start:
            return -1, None
        return start, marker

    def _end_of_certain(self, markers: tuple[str, ...]) -> int:
        """Return the end of the text that is not the beginning of a marker."""
        text = self._text
        for start in range(max(self._pos, len(text) - _longest(markers) + 1), len(text)):
            if any(marker.startswith(text[start:]) for marker in markers):
                return start
        return len(text)


def _longest(markers: tuple[str, ...]) -> int:
    return max(map(len, markers), default=0)
