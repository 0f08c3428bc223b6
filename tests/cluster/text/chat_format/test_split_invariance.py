"""Any text, however it is split, gives the same deltas in every format, and never an exception."""

from __future__ import annotations

import pytest
from chat_outputs import parse
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.text.chat_format.registry import REASONING_FORMATS, TOOL_CALL_FORMATS

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


CUTS = st.lists(st.integers(0, 400), max_size=8)
# Several names stand for one format.
TOOL_CALLS = sorted({each.read: name for name, each in TOOL_CALL_FORMATS.items()}.values())
NUM_EXAMPLES = [pytest.param(30, id="few"), pytest.param(800, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", TOOL_CALLS)
def test_tool_calls_do_not_depend_on_the_split(name: str, num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(texts(TOOL_CALL_FORMATS[name].markers), CUTS)
    def check(text: str, cuts: list[int]) -> None:
        check_split(text, cuts, name, "qwen3")

    check()


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", ["deepseek_r1", "granite", "qwen3"])
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
    for call in whole[1].tool_calls:
        (call.name + call.arguments).encode()
