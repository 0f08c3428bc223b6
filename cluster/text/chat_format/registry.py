"""Formats of tool calls and of reasoning by name. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from . import harmony
from .model_output import ModelOutput, Parse
from .output_parser import new_call_id
from .reasoning import ReasoningStart, ReasoningTags
from .tool_calls import (
    deepseek,
    glm45,
    granite,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from .tool_structures import TOOL_STRUCTURES, ToolStructure

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format of tool calls.

    Attributes:
        read: reads content and tool calls up to the end of the text.
        markers: texts that the format depends on, which may be special tokens.
        new_id: returns the id of a call for which the model wrote none.
        structure: texts around the arguments, for grammars; None if no grammar can force the format.
    """

    read: Callable[[ModelOutput], Parse[None]]
    markers: tuple[str, ...]
    new_id: Callable[[], str] = new_call_id
    structure: ToolStructure | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of reasoning.

    Attributes:
        read: reads the reasoning from the beginning of the text.
        start: rendered prompt |-> the state in which it leaves the model.
        markers: texts that the format depends on, which may be special tokens.
        openings: texts with which the model begins its reasoning; empty if it always reasons.
        closings: texts that end the reasoning; the reply follows.
    """

    read: Callable[[ModelOutput, ReasoningStart], Parse[None]]
    start: Callable[[str], ReasoningStart]
    markers: tuple[str, ...]
    openings: tuple[str, ...]
    closings: tuple[str, ...]


def _tagged(tags: ReasoningTags) -> ReasoningFormat:
    return ReasoningFormat(tags.read, tags.start, tags.markers, tags.openings, tags.closings)


_THINK = ReasoningTags(("<think>",), ("</think>",))
_IMPLIED_THINK = ReasoningTags(("<think>",), ("</think>",), is_implied=True)
_GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)

_LLAMA_JSON = ToolCallFormat(llama3_json.llama3_json, llama3_json.MARKERS)
_PYTHONIC = ToolCallFormat(pythonic.pythonic, pythonic.MARKERS)
_QWEN_CODER = ToolCallFormat(qwen3_coder.qwen3_coder, qwen3_coder.MARKERS)

_READERS: Mapping[str, ToolCallFormat] = {
    "deepseek_v3": ToolCallFormat(deepseek.deepseek_v3, deepseek.MARKERS),
    "deepseek_v31": ToolCallFormat(deepseek.deepseek_v31, deepseek.MARKERS),
    "glm45": ToolCallFormat(glm45.glm45, glm45.MARKERS),
    "granite": ToolCallFormat(granite.granite, granite.MARKERS),
    "hermes": ToolCallFormat(hermes.hermes, hermes.MARKERS),
    "kimi_k2": ToolCallFormat(kimi_k2.kimi_k2, kimi_k2.MARKERS),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _PYTHONIC,
    "mistral": ToolCallFormat(mistral.mistral, mistral.MARKERS, mistral.new_mistral_id),
    "openai": ToolCallFormat(harmony.harmony, harmony.MARKERS),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
}
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    name: replace(each, structure=TOOL_STRUCTURES.get(name)) for name, each in _READERS.items()
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": _tagged(_IMPLIED_THINK),
    "deepseek_v3": _tagged(_THINK),
    "glm45": _tagged(_THINK),
    "granite": _tagged(_GRANITE),
    "mistral": _tagged(ReasoningTags(("[THINK]",), ("[/THINK]",))),
    "openai_gptoss": ReasoningFormat(
        harmony.harmony, lambda prompt: ReasoningStart.UNKNOWN, harmony.MARKERS, (), (harmony.FINAL_MESSAGE,)
    ),
    "qwen3": _tagged(_THINK),
    "seed_oss": _tagged(ReasoningTags(("<seed:think>",), ("</seed:think>",))),
}
