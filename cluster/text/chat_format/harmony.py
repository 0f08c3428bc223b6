"""Harmony, the format of gpt-oss: messages in channels, between special tokens.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME<|message|>{...}``

The library openai-harmony reads it from token ids, but downloads its vocabulary at run time. The text includes the
special tokens and is all that the parser needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .deltas import ChatDelta, ContentDelta, ReasoningDelta
from .json_call import emit_arguments
from .model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from .tool_format import ToolCallFormat

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = "<|end|>", "<|call|>", "<|return|>"
MARKERS = _START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS

# Texts of the chat templates that write it.
HARMONY = ((_CHANNEL, _MESSAGE),)

# Begins the reply.
FINAL_MESSAGE = f"{_CHANNEL}final{_MESSAGE}"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
# The prompt ends with <|start|>assistant.
_HEADER_STARTS = _CHANNEL, "to=", _START, "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCalls(ToolCallFormat):
    """Tool calls in messages of their own."""

    extras: tuple[str, ...] = MARKERS
    is_forced: bool = False

    def read(self, output: ModelOutput) -> Parse[None]:
        return harmony(output)


def harmony(output: ModelOutput) -> Parse[None]:
    """Read the whole text: reasoning, content and tool calls."""
    while (yield from output.peek()):
        header = yield from _header(output)
        if header is None:
            yield from output.emit_until(ContentDelta, *_ENDS)
            continue
        make, is_call = _kind(output, header)
        if is_call is not None:
            yield is_call
            yield from output.skip()
            if not (yield from emit_arguments(output, *_ENDS)):
                yield output.arguments("{}")
            yield from output.text_until(*_ENDS)
            continue
        if make is ReasoningDelta:
            output.begin_reasoning()
        end = yield from output.emit_until(make, *_ENDS)
        if make is ReasoningDelta:
            output.end_reasoning(end)


def _header(output: ModelOutput) -> Parse[str | None]:
    """Read a message's header; return None, with nothing read, if there is none."""
    output.bookmark()
    yield from output.skip()
    first = yield from output.accept(*_HEADER_STARTS)
    header, marker = "", None
    if first is not None:
        header, marker = yield from output.text_until(_MESSAGE, max_chars=MAX_HEADER_CHARS)
    if first is None or marker is None:
        output.rewind()
        return None
    output.commit()
    return first + header


def _kind(output: ModelOutput, header: str) -> tuple[Callable[[str], ChatDelta], ChatDelta | None]:
    """Return what makes a delta of the message's text, and the beginning of the tool call if it is one."""
    recipient = _RECIPIENT.search(header)
    if recipient is not None and output.tools:
        name = recipient[1].removeprefix(_FUNCTIONS)
        if name in output.tools or recipient[1].startswith(_FUNCTIONS):
            return ContentDelta, output.start_call(name)
    channel = _CHANNEL_NAME.search(header)
    return (ReasoningDelta if channel is not None and channel[1] == "analysis" else ContentDelta), None
