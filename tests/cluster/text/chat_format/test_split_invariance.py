"""Any text, however it is split, gives the same deltas in every format, never an exception and no broken JSON."""

from __future__ import annotations

import json
import re

import pytest
from chat_outputs import parse
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.text.chat_format.deltas import AssistantMessage
from quire.cluster.text.chat_format.json_text import JsonText
from quire.cluster.text.chat_format.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from quire.cluster.text.chat_format.tool_format import ToolCallFormat

COMMON = [
    "<think>", "</think>", '{"name": "now", "arguments": ', '"parameters": ', '{"city": "a"}', "}", "]", "[", ")",
    '"', "\\", "'", ",", ";", ": ", "{", "(", "now", "get_weather", "city=", "\n", " ", "é", "💡", "x", "12", "null",
    "<function=", "<parameter=", ">", "</parameter>", "</function>", "```json", "functions.", "to=functions.now",
    "analysis", "final", "commentary", "assistant",
]  # fmt: skip


def texts(markers: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts of whole and of broken markers, and of what usually stands between them."""
    whole = st.sampled_from([*markers, *COMMON])
    broken = whole.flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end]))
    return st.lists(whole | whole | broken | st.text(max_size=3), max_size=25).map("".join)


def pieces_of(form: ToolCallFormat) -> tuple[str, ...]:
    """Markers of a format, and the texts around names, keys and values."""
    header = re.split(r"\{\w+\}", form.header)
    argument = re.split(r"\{\w+\}", getattr(form, "argument", ""))
    quote = getattr(form, "quote", "")
    texts = (form.begin, form.end, form.call_end, *form.openings, *header, *argument, quote)
    texts += (form.header.replace("{name}", "now"),)
    return tuple(text for text in (*form.markers, *texts) if text)


CUTS = st.lists(st.integers(0, 400), max_size=8)
# Several names stand for one format.
TOOL_CALLS = sorted({id(each): name for name, each in TOOL_CALL_FORMATS.items()}.values())
REASONING = sorted({id(each): name for name, each in REASONING_FORMATS.items()}.values())
NUM_EXAMPLES = [pytest.param(30, id="few"), pytest.param(800, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", TOOL_CALLS)
def test_tool_calls_do_not_depend_on_the_split(name: str, num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(texts(pieces_of(TOOL_CALL_FORMATS[name])), CUTS)
    def check(text: str, cuts: list[int]) -> None:
        check_split(text, cuts, name, "qwen3")

    check()


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_does_not_depend_on_the_split(name: str, num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(texts(REASONING_FORMATS[name].markers), CUTS)
    def check(text: str, cuts: list[int]) -> None:
        check_split(text, cuts, "hermes", name)

    check()


def check_split(text: str, cuts: list[int], tool_calls: str, reasoning: str) -> None:
    whole = parse([text], tool_calls, reasoning)
    assert parse(list(text), tool_calls, reasoning) == whole
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert parse(pieces, tool_calls, reasoning) == whole
    check_arguments(text, whole[1])


def check_arguments(text: str, message: AssistantMessage) -> None:
    """Check that arguments are JSON objects, but for those of a call that the end of the text cut off."""
    for index, call in enumerate(message.tool_calls):
        (call.name + call.arguments).encode()
        if index < len(message.tool_calls) - 1:
            assert isinstance(json.loads(call.arguments), dict), text
        else:
            assert is_begun(call.arguments), (text, call.arguments)


def is_begun(arguments: str) -> bool:
    """Return whether closing what is open in a text makes it a JSON object."""
    if not arguments:
        return True
    scanner = JsonText()
    read, _ = scanner.feed(arguments)
    whole = read + ("" if scanner.is_complete else scanner.close())
    return isinstance(json.loads(whole), dict) and whole.startswith(arguments.rstrip(" ,:\t\r\n"))
