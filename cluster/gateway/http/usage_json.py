"""The end of a completion, its usage and its timings as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ....proto.stream import Timings
from ...text.requests.outputs import CompletionFinished, CompletionOutput, Usage


def ending_json(completion: CompletionOutput | CompletionFinished) -> dict[str, Any]:
    """Return why a choice ended, and the version of the weights if an operator has changed them."""
    return {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **version_json(completion),
    }


def version_json(completion: CompletionOutput | CompletionFinished) -> dict[str, str]:
    """Return the member `weights_version`; none for the weights that the server started with."""
    return {"weights_version": completion.weights_version} if completion.weights_version else {}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_json(timings: Timings) -> dict[str, float]:
    """Return the seconds that a completion spent in each stage."""
    return {name: round(value, 6) for name, value in asdict(timings).items()}


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Return the sum over prompts."""
    each = list(usages)
    return Usage(
        sum(usage.prompt_tokens for usage in each),
        sum(usage.completion_tokens for usage in each),
        sum(usage.cached_tokens for usage in each),
        sum(usage.reasoning_tokens for usage in each),
    )
