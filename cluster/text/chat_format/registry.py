"""Formats of tool calls and of reasoning by name, and their detection. The names are those of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping

from .harmony import HARMONY
from .reasoning import HarmonyReasoning, ReasoningFormat
from .tool_format import ToolCallFormat
from .tool_table import TOOL_CALL_FORMATS as TOOL_CALL_FORMATS

AUTO, NONE = "auto", "none"

_THINK = ReasoningFormat(
    shown_by=[("<think>",), ("</think>",)],
    models="Qwen 3, DeepSeek V3.1 to V4.1, GLM 4.5 to 5, Kimi K2, Nemotron 3, OLMo 3, MiMo, Laguna, Hunyuan 3",
)
_IMPLIED_THINK = ReasoningFormat(is_implied=True, models="DeepSeek R1, MiniMax M2, Step3")
# The order is that of the detection: the most specific first.
_TABLE: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": HarmonyReasoning(shown_by=HARMONY, models="gpt-oss"),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        shown_by=[("<|open|>", "<|sep|>")],
        models="Kimi K3",
    ),
    "gemma4": ReasoningFormat(
        ("<|channel>thought\n", "<|channel>"), ("<channel|>",), shown_by=[("<|channel>",)], models="Gemma 4"
    ),
    "mistral": ReasoningFormat(
        ("[THINK]",), ("[/THINK]",), shown_by=[("[THINK]",)], models="Magistral, Mistral Small 4"
    ),
    "seed_oss": ReasoningFormat(
        ("<seed:think>",), ("</seed:think>",), shown_by=[("<seed:think>",)], models="Seed-OSS"
    ),
    "minimax_m3": ReasoningFormat(
        ("<mm:think>",), ("</mm:think>",), shown_by=[("<mm:think>",)], models="MiniMax M3"
    ),
    "solar_open2": ReasoningFormat(
        ("<|think:start|>",), ("<|think:end|>",), shown_by=[("<|think:start|>",)], models="Solar Open 2"
    ),
    "apertus": ReasoningFormat(
        ("<|inner_prefix|>",), ("<|inner_suffix|>",), shown_by=[("<|inner_prefix|>",)], models="Apertus"
    ),
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        shown_by=[("<|START_THINKING|>",)],
        models="Command A Reasoning, Command A+",
    ),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",), shown_by=[("◁think▷",)], models="Kimi-VL Thinking"),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        shown_by=[("Here is my thought process",)],
        models="Granite 3.2",
    ),
    "hunyuan_a13b": ReasoningFormat(
        wrappers=("<answer>", "</answer>"), shown_by=[("<think>", "<answer>")], models="Hunyuan A13B"
    ),
    "ernie45": ReasoningFormat(
        wrappers=("<response>", "</response>"),
        shown_by=[("<think>", "<response>")],
        models="ERNIE 4.5 Thinking",
    ),
    "qwen3": _THINK,
    "deepseek_r1": _IMPLIED_THINK,
    "minimax_m2_append_think": ReasoningFormat(
        is_content=True, models="MiniMax M2, reasoning kept in the content"
    ),
}
# Names of vLLM and SGLang for formats of the table.
_ALIASES = {
    "qwen3": (
        "deepseek_v3 deepseek-v3 deepseek_v4 deepseek-v4 glm45 glm47 holo2 hunyuan hy_v3 hy_v4 interns1 kimi_k2 mimo "
        "nemotron_3 nemotron_v3 olmo3 poolside_v1 telechat4"
    ),
    "deepseek_r1": "deepseek-r1 minimax minimax_m2 qwen3-thinking step3 step3p5",
    "minimax_m2_append_think": "minimax-append-think",
    "minimax_m3": "minimax-m3",
    "apertus": "apertus2509",
    "cohere_command3": "cohere_command4",
    "openai_gptoss": "gpt-oss",
}
# name |-> format
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **_TABLE,
    **{alias: _TABLE[name] for name, aliases in _ALIASES.items() for alias in aliases.split()},
}


def detect(formats: Mapping[str, ToolCallFormat | ReasoningFormat], template: str) -> str | None:
    """Return the name of the first format that a chat template shows; None if it shows none."""
    for name, each in formats.items():
        if any(all(text in template for text in texts) for texts in each.shown_by):
            return name
    return None
