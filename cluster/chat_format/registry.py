"""Formats of tool calls and of reasoning by name. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .model_output import ModelOutput, Parse
from .reasoning import ReasoningStart, ReasoningTags
from .tool_calls import hermes

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format of tool calls.

    Attributes:
        read: reads content and tool calls up to the end of the text.
        markers: texts that the format depends on, which may be special tokens.
    """

    read: Callable[[ModelOutput], Parse[None]]
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of reasoning.

    Attributes:
        read: reads the reasoning from the beginning of the text.
        start: rendered prompt |-> the state in which it leaves the model.
        markers: texts that the format depends on, which may be special tokens.
    """

    read: Callable[[ModelOutput, ReasoningStart], Parse[None]]
    start: Callable[[str], ReasoningStart]
    markers: tuple[str, ...]


def _tagged(tags: ReasoningTags) -> ReasoningFormat:
    return ReasoningFormat(tags.read, tags.start, tags.markers)


_THINK = ReasoningTags(("<think>",), ("</think>",))
_IMPLIED_THINK = ReasoningTags(("<think>",), ("</think>",), is_implied=True)
_GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "hermes": ToolCallFormat(hermes.hermes, hermes.MARKERS),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": _tagged(_IMPLIED_THINK),
    "deepseek_v3": _tagged(_THINK),
    "glm45": _tagged(_THINK),
    "granite": _tagged(_GRANITE),
    "mistral": _tagged(ReasoningTags(("[THINK]",), ("[/THINK]",))),
    "qwen3": _tagged(_THINK),
    "seed_oss": _tagged(ReasoningTags(("<seed:think>",), ("</seed:think>",))),
}
