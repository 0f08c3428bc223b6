"""Parsed output of a chat: typed deltas, and the assistant message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text of the reply."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of a tool call.

    Attributes:
        index: number of the call within the message, from 0.
        id: identifier that the tool's result must refer to.
        name: name of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """New text of a call's arguments. The fragments of a call joined are a JSON object, if the model wrote one."""

    index: int
    text: str


TextDelta = ReasoningDelta | ContentDelta
ChatDelta = TextDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function that the model asks for.

    Attributes:
        arguments: JSON text as the model wrote it, which is not always valid.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """Reply of a model.

    Attributes:
        content: text of the reply; None if there is none.
        reasoning_content: text of the reasoning; None if there is none.
        tool_calls: the calls, in the order in which the model wrote them.
    """

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


def collect_message(deltas: Iterable[ChatDelta]) -> AssistantMessage:
    """Return the message that all deltas of a completion add up to."""
    content, reasoning = [], []
    calls: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            calls.append(delta)
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    return AssistantMessage(
        content="".join(content) or None,
        reasoning_content="".join(reasoning) or None,
        tool_calls=tuple(
            ToolCall(call.id, call.name, "".join(texts)) for call, texts in zip(calls, arguments, strict=True)
        ),
    )


def merge_deltas(deltas: Iterable[ChatDelta]) -> list[ChatDelta]:
    """Return the deltas with neighbors of one kind joined."""
    merged: list[ChatDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, ToolCallStart) or type(last) is not type(delta):
            merged.append(delta)
        elif isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments):
            if last.index == delta.index:
                merged[-1] = replace(last, text=last.text + delta.text)
            else:
                merged.append(delta)
        elif isinstance(last, ReasoningDelta | ContentDelta):
            merged[-1] = replace(last, text=last.text + delta.text)
    return merged
