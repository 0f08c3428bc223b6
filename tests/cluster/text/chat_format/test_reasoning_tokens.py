"""Count of the tokens that are reasoning, for every way in which they arrive."""

from __future__ import annotations

import itertools

import pytest
from chat_outputs import new_parser

HARMONY = [
    "<|channel|>", "analysis", "<|message|>", "First", " thought.", "<|end|>", "<|start|>", "assistant",
    "<|channel|>", "final", "<|message|>", "Hello", ".", "<|return|>",
]  # fmt: skip


@pytest.mark.parametrize(
    ("reasoning", "prompt", "tokens", "count"),
    [
        ("qwen3", "", ["<think>", "\n", "Hm", ",", " so.", "\n", "</think>", "\n\n", "Yes", "."], 5),
        ("qwen3", "", ["Yes", ", ", "<", "think"], 0),
        ("qwen3", "<think>\n", ["Hm", ".", "</think>", "Yes"], 2),
        ("qwen3", "<think>\n", ["Hm", ", 1 <", "/", "2"], 4),
        ("qwen3", "<think>\n", ["Hm.<", "/thi", "nk>", "Yes"], 1),
        ("qwen3", "<think></think>", ["Yes", "."], 0),
        # A token without text belongs to the next one; the last one's text comes with the end.
        ("qwen3", "<think>\n", ["", "é", "", "x", "</think>", "", "y"], 4),
        ("openai_gptoss", "", HARMONY, 2),
    ],
)
def test_tokens_between_the_tags_are_counted(
    reasoning: str, prompt: str, tokens: list[str], count: int
) -> None:
    for cuts in itertools.product((False, True), repeat=len(tokens) - 1):
        parser = new_parser(reasoning=reasoning, prompt=prompt)
        counter = parser.reasoning_tokens
        assert counter is not None
        pushed: list[str] = []
        for token, is_last in zip(tokens, (*cuts, True), strict=True):
            pushed.append(token)
            if is_last:
                counter.push(map(len, pushed))
                parser.push("".join(pushed))
                pushed = []
        parser.finish()
        assert counter.count == count, cuts


def test_text_that_is_held_back_to_the_end_is_counted() -> None:
    parser = new_parser(reasoning="qwen3", prompt="<think>")
    counter = parser.reasoning_tokens
    assert counter is not None
    counter.push([2, 0, 0])
    parser.push("Hm")
    assert counter.count == 1
    counter.push_text(1)
    parser.push("\N{REPLACEMENT CHARACTER}")
    parser.finish()
    assert counter.count == 3


def test_tokens_are_not_counted_without_a_reasoning_format() -> None:
    assert new_parser("hermes").reasoning_tokens is None
