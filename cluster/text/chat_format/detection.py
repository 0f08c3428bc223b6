"""Detection of a model's chat format from the text of its chat template."""

from __future__ import annotations

from collections.abc import Sequence

# (texts that a template of the format contains, name of the format), the most specific first.
_TOOL_CALLS: Sequence[tuple[tuple[str, ...], str]] = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (('"name": function name, "parameters"',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)
_REASONING: Sequence[tuple[tuple[str, ...], str]] = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process",), "granite"),
    (("<think>",), "qwen3"),
    (("</think>",), "qwen3"),
)


def detect_tool_call_format(template: str) -> str | None:
    """Return the name of the format in which the template writes earlier tool calls; None if it shows none."""
    return _first(_TOOL_CALLS, template)


def detect_reasoning_format(template: str) -> str | None:
    """Return the name of the reasoning's format; None if the template shows none."""
    return _first(_REASONING, template)


def _first(formats: Sequence[tuple[tuple[str, ...], str]], template: str) -> str | None:
    return next((name for texts, name in formats if all(text in template for text in texts)), None)
