"""The table of tool formats: in each one, two calls with text before them, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_outputs import parse_all_ways

from quire.cluster.text.chat_format.reasoning import ReasoningFormat
from quire.cluster.text.chat_format.registry import REASONING_FORMATS, TOOL_CALL_FORMATS, detect
from quire.cluster.text.chat_format.tool_format import ToolCallFormat

CITY = '{"city": "Pa\\"ris", "days": 3}'
GLM = (
    "<tool_call>get_weather{sep}<arg_key>city</arg_key>\n<arg_value>Pa\"ris</arg_value>\n<arg_key>days</arg_key>"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now{sep}</tool_call>"
)  # fmt: skip
INVOKE = (
    '<{x}invoke name="get_weather">\n<{x}parameter name="city">Pa"ris</{x}parameter>\n'
    '<{x}parameter name="days">3</{x}parameter>\n</{x}invoke>\n<{x}invoke name="now">\n</{x}invoke>\n'
)
DSML = (
    '<{x}invoke name="get_weather">\n<{x}parameter name="city" string="true">Pa"ris</{x}parameter>\n'
    '<{x}parameter name="days" string="false">3</{x}parameter>\n</{x}invoke>\n<{x}invoke name="now">\n</{x}invoke>\n'
)
FUNCTION = (
    '<function=get_weather>\n<parameter=city>\nPa"ris\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "</function>\n"
)
LIST = f'[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]'
PYTHON = "get_weather(city='Pa\"ris', days=3)"
OBJECTS = [f'{{"name": "get_weather", "{arguments}": {CITY}}}' for arguments in ("arguments", "parameters")]
NOW = ['{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {}}']


def gemma(begin: str, quote: str, end: str) -> str:
    return f'{begin}call:get_weather{{city:{quote}Pa"ris{quote},days:3}}{end}{begin}call:now{{}}{end}'


def k3(name: str, number: int, *arguments: tuple[str, str, str]) -> str:
    texts = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="{number}"<|sep|>{texts}<|close|>call<|sep|>'


def m3(text: str) -> str:
    """Return a text with the mark of MiniMax M3 before each tag."""
    return text.replace("<", "]<]minimax[>[<")


# name |-> calls of get_weather with a city and days, and of now, as the model writes them
TEXTS = {
    "apertus": f'<|tools_prefix|>[{{"get_weather": {CITY}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "cohere_command3": (
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {CITY}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + CITY
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": f"<｜DSML｜function_calls>\n{DSML.format(x='｜DSML｜')}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML.format(x='｜DSML｜')}</｜DSML｜tool_calls>",
    "deepseek_v41": f"<｜DSML｜ calls>\n{DSML.format(x='｜DSML｜ ')}</｜DSML｜ calls>",
    "dots": f"<dots_function_call>\n{INVOKE.format(x='')}</dots_function_call>",
    "functiongemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECTS[0]}\n<|function_call|>{NOW[0]}",
    "gigachat35": f"<｜GCML｜function_calls>\n{DSML.format(x='｜GCML｜')}</｜GCML｜function_calls>",
    "glm45": GLM.format(sep="\n"),
    "granite": f"<|tool_call|>{LIST}",
    "granite-20b-fc": f"<function_call> {OBJECTS[0]} <function_call> {NOW[0]}",
    "hermes": f"<tool_call>\n{OBJECTS[0]}\n</tool_call>\n<tool_call>\n{NOW[0]}\n</tool_call>",
    "hunyuan_a13b": f"<tool_calls>{LIST}</tool_calls>",
    "hy_v3": f"<tool_calls>\n{GLM.format(sep='<tool_sep>')}\n</tool_calls>",
    "hy_v4": f"<tool_calls>{GLM.format(sep='')}</tool_calls>",
    "internlm": (
        f"<|action_start|><|plugin|>\n{OBJECTS[1]}\n<|action_end|>\n"
        f"<|action_start|> <|plugin|>{NOW[1]}<|action_end|>"
    ),
    "k2_horizon": (
        '<ifm|tool_calls><ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Pa"ris'
        "</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key><ifm|arg_value>3</ifm|arg_value></ifm|tool_call>\n"
        "<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{CITY}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        "<|open|>tools<|sep|>"
        + k3("get_weather", 1, ("city", "string", 'Pa"ris'), ("days", "number", "3"))
        + k3("now", 2)
        + "<|close|>tools<|sep|>"
    ),
    "lfm2": f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>",
    "llama3_json": f"{OBJECTS[1]}; {NOW[1]}",
    "longcat": (
        f"<longcat_tool_call>\n{OBJECTS[0]}\n</longcat_tool_call>\n"
        f"<longcat_tool_call>{NOW[0]}</longcat_tool_call>"
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city"><![CDATA[Pa"ris]]></param><param name="days">3</param>'
        '</function>\n<function name="now"></function>'
    ),
    "minimax_m2": f"<minimax:tool_call>\n{INVOKE.format(x='')}</minimax:tool_call>",
    "minimax_m3": m3(
        '<tool_call>\n<invoke name="get_weather"><city>Pa"ris</city><days>3</days></invoke>\n'
        '<invoke name="now"></invoke>\n</tool_call>'
    ),
    "mistral": f"[TOOL_CALLS]{LIST}",
    "nemotron_json": f"<TOOLCALL>{LIST}</TOOLCALL>",
    "olmo3": f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>",
    "phi4_mini_json": f"functools{LIST}",
    "pythonic": f"[{PYTHON}, now()]",
    "qwen3_coder": f"<tool_call>\n{FUNCTION}</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": (
        f"<seed:tool_call>\n{FUNCTION}</seed:tool_call>\n"
        "<seed:tool_call><function=now></function></seed:tool_call>"
    ),
    "solar_open2": (
        '<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Pa"ris<|tool_arg:end|>\n'
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n"
        "<|tool_call:start|>now\n<|tool_call:end|>"
    ),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Pa"ris</steptml:parameter>'
        '<steptml:parameter name="days">3</steptml:parameter>'
        '</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "xlam": LIST,
}  # fmt: skip

# The names that `vllm serve --tool-call-parser` and `python -m sglang.launch_server --tool-call-parser` know.
PEERS = (
    "apertus apertus2509 cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 "
    "deepseekv3 deepseekv31 deepseekv32 deepseekv4 dots ernie45 functiongemma gemma4 gigachat3 gigachat35 glm "
    "glm45 glm47 gpt-oss granite granite-20b-fc granite4 hermes hunyuan hunyuan_a13b hy_v3 internlm interns1 "
    "jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 llama3_json llama4_json llama4_pythonic longcat mimo "
    "minicpm5 minimax-m2 minimax_m2 minimax_m3 mistral olmo3 openai phi4_mini_json poolside_v1 pythonic qwen qwen25 "
    "qwen3_coder qwen3_xml seed_oss solar_open2 spark25 step3 step3p5 trinity xlam "
)
REASONING_PEERS = (
    "apertus2509 cohere_command3 cohere_command4 deepseek-r1 deepseek-v3 deepseek-v4 deepseek_r1 deepseek_v3 "
    "deepseek_v4 ernie45 gemma4 glm45 glm47 gpt-oss granite holo2 hunyuan hunyuan_a13b hy_v3 interns1 kimi "
    "kimi_k2 kimi_k3 mimo minimax minimax-append-think minimax-m3 minimax_m2 minimax_m2_append_think "
    "minimax_m3 mistral nemotron_3 nemotron_v3 olmo3 openai_gptoss poolside_v1 qwen3 qwen3-thinking seed_oss "
    "solar_open2 step3 step3p5 telechat4 "
)


def test_every_format_has_a_case() -> None:
    # Harmony has a file of its own.
    formats = set(map(id, TOOL_CALL_FORMATS.values()))
    formats.discard(id(TOOL_CALL_FORMATS["openai"]))
    assert {id(TOOL_CALL_FORMATS[name]) for name in TEXTS} == formats


def test_the_names_of_peers_are_known() -> None:
    assert set(PEERS.split()) <= TOOL_CALL_FORMATS.keys()
    assert set(REASONING_PEERS.split()) <= REASONING_FORMATS.keys()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_opening_is_the_beginning_of_another(name: str) -> None:
    each = TOOL_CALL_FORMATS[name]
    openings = (*each.tags, *each.untagged)
    assert not [
        (one, other) for one in openings for other in openings if one != other and other.startswith(one)
    ]


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize(("before", "after"), [("", ""), ("Hm.\n", ""), ("", "\nSo it is.")])
def test_calls_are_read(name: str, before: str, after: str) -> None:
    message = parse_all_ways(before + TEXTS[name] + after, name, num_random=3)
    arguments: list[tuple[str, Any]] = [
        (call.name, json.loads(call.arguments)) for call in message.tool_calls
    ]
    assert arguments == [("get_weather", {"city": 'Pa"ris', "days": 3}), ("now", {})]
    assert (message.content or "") == before.strip() + after.strip()


@pytest.mark.parametrize("name", sorted(name for name in TEXTS if not TOOL_CALL_FORMATS[name].untagged))
def test_a_call_within_reasoning_ends_it(name: str) -> None:
    message = parse_all_ways(f"<think>Hm.\n{TEXTS[name]}", name, "qwen3", num_random=3)
    assert (message.reasoning_content, message.content) == ("Hm.", None)
    assert [call.name for call in message.tool_calls] == ["get_weather", "now"]


@pytest.mark.parametrize("name", sorted(name for name in TEXTS if TOOL_CALL_FORMATS[name].shown_by))
def test_the_format_is_found_in_a_template_with_its_texts(name: str) -> None:
    for texts in TOOL_CALL_FORMATS[name].shown_by:
        found = detect(TOOL_CALL_FORMATS, " ".join(texts))
        assert found == name, texts


def rows(formats: Mapping[str, ToolCallFormat] | Mapping[str, ReasoningFormat]) -> list[str]:
    """Return the rows of the table of formats on the page of tools."""
    names: dict[int, list[str]] = {}
    for name, each in formats.items():
        names.setdefault(id(each), []).append(name)
    found = []
    for first, *others in names.values():
        each = formats[first]
        cells = [f"`{first}`", ", ".join(f"`{name}`" for name in sorted(others)), each.models]
        if isinstance(each, ToolCallFormat):
            cells.append("no" if each.structure is None else "yes")
        found.append(f"| {' | '.join(cells)} |")
    return sorted(found)


@pytest.mark.parametrize("formats", [TOOL_CALL_FORMATS, REASONING_FORMATS], ids=["tools", "reasoning"])
def test_the_page_of_tools_has_every_format(formats: Any) -> None:
    page = (Path(__file__).parents[4] / "docs" / "tools.md").read_text()
    expected = "\n".join(rows(formats))
    assert expected in page, expected
