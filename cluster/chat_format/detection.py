"""Detection of a model's chat format from the text of its chat template."""

from __future__ import annotations

from collections.abc import Sequence

# (texts that a template of the format contains, name of the format), the most specific first.
_TOOL_CALLS: Sequence[tuple[tuple[str, ...], str]] = ((("<tool_call>",), "hermes"),)
_REASONING: Sequence[tuple[tuple[str, ...], str]] = (
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
