"""Formats of tool calls and of reasoning by name, and their detection. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import harmony
from .model_output import ModelOutput, Parse
from .reasoning import ReasoningStart, ReasoningTags
from .tool_calls import json_formats, tag_formats
from .tool_calls.pythonic import PYTHONIC
from .tool_calls.tool_format import ToolCallFormat

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of reasoning.

    Attributes:
        read: reads the reasoning from the beginning of the text.
        start: rendered prompt |-> the state in which it leaves the model.
        markers: texts that the format depends on, which may be special tokens.
        start_tags: texts with which the model begins its reasoning; empty if it always reasons.
        end_tags: texts that end the reasoning; the reply follows.
        shown_by: a chat template with all texts of one of these entries writes the format.
    """

    read: Callable[[ModelOutput, ReasoningStart], Parse[None]]
    start: Callable[[str], ReasoningStart]
    markers: tuple[str, ...]
    start_tags: tuple[str, ...]
    end_tags: tuple[str, ...]
    shown_by: Sequence[tuple[str, ...]] = ()


def detect(formats: Mapping[str, ToolCallFormat | ReasoningFormat], template: str) -> str | None:
    """Return the name of the first format that a chat template shows; None if it shows none."""
    for name, each in formats.items():
        if any(all(text in template for text in texts) for texts in each.shown_by):
            return name
    return None


def _tagged(tags: ReasoningTags, *shown_by: tuple[str, ...]) -> ReasoningFormat:
    return ReasoningFormat(tags.read, tags.start, tags.markers, tags.start_tags, tags.end_tags, shown_by)


_HARMONY = (("<|channel|>", "<|message|>"),)
_FORMATS: Mapping[str, ToolCallFormat] = {
    "openai": ToolCallFormat(harmony.harmony, harmony.MARKERS, shown_by=_HARMONY),
    **tag_formats.FORMATS,
    "pythonic": PYTHONIC,
    **json_formats.FORMATS,
}
# The order is that of the detection: the most specific first.
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    **_FORMATS,
    "llama4_json": _FORMATS["llama3_json"],
    "llama4_pythonic": PYTHONIC,
    "qwen3_xml": _FORMATS["qwen3_coder"],
}

_THINK = ReasoningTags(("<think>",), ("</think>",))
_IMPLIED_THINK = ReasoningTags(("<think>",), ("</think>",), is_implied=True)
_GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat(
        harmony.harmony,
        lambda prompt: ReasoningStart.UNKNOWN,
        harmony.MARKERS,
        (),
        (harmony.FINAL_MESSAGE,),
        _HARMONY,
    ),
    "mistral": _tagged(ReasoningTags(("[THINK]",), ("[/THINK]",)), ("[THINK]",)),
    "seed_oss": _tagged(ReasoningTags(("<seed:think>",), ("</seed:think>",)), ("<seed:think>",)),
    "granite": _tagged(_GRANITE, ("Here is my thought process",)),
    "qwen3": _tagged(_THINK, ("<think>",), ("</think>",)),
    "deepseek_r1": _tagged(_IMPLIED_THINK),
    "deepseek_v3": _tagged(_THINK),
    "glm45": _tagged(_THINK),
}
