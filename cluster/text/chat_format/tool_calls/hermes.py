"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` per call."""

from __future__ import annotations

from ..json_call import json_call
from ..model_output import ModelOutput, Parse
from .marked import content_and_calls

MARKERS = OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _call, OPEN)


def _call(output: ModelOutput, opening: str) -> Parse[bool]:
    if not (yield from json_call(output, CLOSE)):
        return False
    yield from output.text_until(CLOSE)
    return True
