"""Granite: ``<|tool_call|>`` and a JSON list of calls."""

from __future__ import annotations

from ..json_call import json_calls
from ..model_output import ModelOutput, Parse
from .marked import content_and_calls

MARKERS = OPEN, CLOSE = "<|tool_call|>", "</tool_call>"


def granite(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _calls, OPEN, "<tool_call>")


def _calls(output: ModelOutput, opening: str) -> Parse[bool]:
    if not (yield from json_calls(output, CLOSE)):
        return False
    yield from output.skip()
    yield from output.accept(CLOSE)
    return True
