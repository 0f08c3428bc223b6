"""Helpers of tests of chat formats: parses whole texts, and the same texts in pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any

from quire.cluster.text.chat_format.chat_format import ChatFormat
from quire.cluster.text.chat_format.deltas import AssistantMessage, ChatDelta, ToolCall, merge_deltas
from quire.cluster.text.chat_format.output_parser import ChatOutputParser

WEATHER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
    },
}
TOOLS: Mapping[str, Mapping[str, Any]] = {"get_weather": WEATHER, "now": {}}


def new_parser(
    tool_calls: str = "none",
    reasoning: str = "none",
    *,
    prompt: str = "",
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
    **options: Any,
) -> ChatOutputParser:
    """Return a parser whose calls have the ids call-0, call-1 and so on."""
    numbers = itertools.count()
    found = ChatFormat.find(tool_calls, reasoning, None)
    return found.parser(prompt, tools, new_id=lambda: f"call-{next(numbers)}", **options)


def parse(pieces: Iterable[str], *formats: str, **options: Any) -> tuple[list[ChatDelta], AssistantMessage]:
    """Return the deltas of all pieces, with neighbors of one kind joined, and the message."""
    parser = new_parser(*formats, **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.finish()
    return merge_deltas(deltas), parser.message


def parse_all_ways(text: str, *formats: str, num_random: int = 8, **options: Any) -> AssistantMessage:
    """Return the message of a text, which is the same whole, in characters, and split at each and at many places."""
    whole = parse([text], *formats, **options)
    splits = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    draw = random.Random(len(text))
    for _ in range(num_random):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(2, 12)))
        splits.append([text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])])
    for pieces in [list(text), *splits]:
        assert parse(pieces, *formats, **options) == whole, pieces
    return whole[1]


def calls(*named: tuple[str, str]) -> tuple[ToolCall, ...]:
    """Return the tool calls of these names and arguments."""
    return tuple(ToolCall(f"call-{index}", *each) for index, each in enumerate(named))
