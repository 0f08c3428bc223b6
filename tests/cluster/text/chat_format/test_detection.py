"""Formats are found in chat templates, shortened here to the texts that tell."""

from __future__ import annotations

import pytest

from quire.cluster.text.chat_format.chat_format import ChatFormat
from quire.cluster.text.chat_format.registry import REASONING_FORMATS, TOOL_CALL_FORMATS, detect

# family |-> (part of its template, tool calls, reasoning)
TEMPLATES = {
    "Qwen 2.5": ('{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}', "hermes", None),
    "Qwen 3": (
        "<tool_call>{{ tool_call.name }}{% if enable_thinking is false %}<think></think>",
        "hermes",
        "qwen3",
    ),
    "Qwen3-Coder": ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder", None),
    "GLM-4.5": ("<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key> <think></think>", "glm45", "qwen3"),
    "DeepSeek V3": ("<｜tool▁calls▁begin｜>function\n```json", "deepseek_v3", None),
    "DeepSeek R1": (
        "<｜tool▁calls▁begin｜>function\n```json{{ c.split('</think>') }}",
        "deepseek_v3",
        "qwen3",
    ),
    "DeepSeek V3.1": ("{{ '<｜tool▁calls▁begin｜>' }}{% if thinking %}<think>", "deepseek_v31", "qwen3"),
    "Mistral": ("{{- '[TOOL_CALLS]' }}", "mistral", None),
    "Magistral": ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
    "Kimi K2": ("<|tool_calls_section_begin|>{% if x %}<think></think>", "kimi_k2", "qwen3"),
    "gpt-oss": ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
    "Granite 3": ("<|tool_call|>{{ x }} Here is my thought process", "granite", "granite"),
    "Llama 3.1": ('respond in {"name": function name, "parameters": dictionary', "llama3_json", None),
    "Llama 3.2, pythonic": ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    "Gemma 2": ("<start_of_turn>user", None, None),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_format_is_found_in_template(family: str) -> None:
    template, tool_calls, reasoning = TEMPLATES[family]
    assert detect(TOOL_CALL_FORMATS, template) == tool_calls
    assert detect(REASONING_FORMATS, template) == reasoning
    found = ChatFormat.find("auto", "auto", template)
    assert found.tool_calls is (None if tool_calls is None else TOOL_CALL_FORMATS[tool_calls])
    assert found.reasoning is (None if reasoning is None else REASONING_FORMATS[reasoning])


def test_named_format_wins_over_the_template() -> None:
    found = ChatFormat.find("mistral", "none", TEMPLATES["Qwen 3"][0])
    assert found == ChatFormat(TOOL_CALL_FORMATS["mistral"], None)


def test_no_format_is_found_without_a_template() -> None:
    assert ChatFormat.find("auto", "auto", None) == ChatFormat()
