"""Forced tool calls: in every format, what the grammar allows is what the format's parser reads."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from grammars import demo_library, random_walk

from quire.cluster.text.chat_format.chat_format import ChatFormat
from quire.cluster.text.chat_format.deltas import AssistantMessage, collect_message
from quire.cluster.text.chat_format.registry import TOOL_CALL_FORMATS
from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_encoder import tool_constraint
from quire.proto.errors import InvalidRequest
from quire.proto.structured_outputs import StructuredOutputsParams
from quire.worker.structured.compilation import GrammarLibrary
from quire.worker.structured.grammar import CompiledGrammar, GrammarSpec

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NUM_WALKS = 6


def tool(name: str, parameters: dict[str, Any] | None = PARAMETERS, **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **members}}


def chat(**settings: Any) -> Chat:
    settings = {"tools": [tool("weather"), tool("news-now")], "tool_choice": "required", **settings}
    return Chat([{"role": "user", "content": "Hi"}], **settings)


@pytest.fixture(scope="module")
def library() -> GrammarLibrary:
    return demo_library()


def compiled(library: GrammarLibrary, chat: Chat, format_name: str) -> CompiledGrammar:
    form = tool_constraint(chat, TOOL_CALL_FORMATS[format_name].structure, None)
    assert form is not None
    return library.load(library.compile(GrammarSpec(form.kind, form.text)))


def parsed(chat: Chat, format_name: str, text: str) -> AssistantMessage:
    parser = ChatFormat(TOOL_CALL_FORMATS[format_name], None).parser("", chat.parameters_by_tool)
    return collect_message([*parser.push(text), *parser.finish()])


# Several names stand for one format.
FORCED = {id(each): name for name, each in TOOL_CALL_FORMATS.items() if each.structure is not None}


@pytest.mark.parametrize("format_name", sorted(FORCED.values()))
def test_forced_calls_are_what_the_parser_reads(library: GrammarLibrary, format_name: str) -> None:
    wanted = chat()
    grammar, names, num_finished = compiled(library, wanted, format_name), set(), 0
    for seed in range(NUM_WALKS):
        walk = random_walk(grammar, library.vocabulary, seed, max_tokens=800)
        if not walk.is_finished:
            continue
        num_finished += 1
        message = parsed(wanted, format_name, walk.text.decode())
        assert message.tool_calls, walk.text
        assert not (message.content or "").strip(), walk.text
        for call in message.tool_calls:
            names.add(call.name)
            jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    assert num_finished >= NUM_WALKS // 2
    assert names <= {"weather", "news-now"}


def test_named_function_is_the_only_one(library: GrammarLibrary) -> None:
    wanted = chat(
        tool_choice={"type": "function", "function": {"name": "news-now"}}, parallel_tool_calls=False
    )
    grammar = compiled(library, wanted, "hermes")
    for seed in range(NUM_WALKS):
        walk = random_walk(grammar, library.vocabulary, seed)
        assert walk.text.startswith(b'<tool_call>\n{"name": "news-now", "arguments": ')
        if walk.is_finished:
            assert len(parsed(wanted, "hermes", walk.text.decode()).tool_calls) == 1


def test_named_function_is_called_once(library: GrammarLibrary) -> None:
    wanted = chat(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert not wanted.allows_parallel_calls
    grammar = compiled(library, wanted, "hermes")
    walks = [random_walk(grammar, library.vocabulary, seed, max_tokens=400) for seed in range(NUM_WALKS)]
    assert {walk.text.count(b"<tool_call>") for walk in walks if walk.is_finished} == {1}


def test_strict_functions_constrain_calls_within_text(library: GrammarLibrary) -> None:
    wanted = chat(tools=[tool("weather", strict=True)], tool_choice="auto")
    matcher = compiled(library, wanted, "hermes").new_matcher()
    text = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "O'
    assert all(matcher.accept(token_id) for token_id in library.vocabulary.encode(text))
    assert matcher.jump_forward_bytes().startswith(b"slo")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


THREE = [tool("weather"), tool("news-now"), tool("clock")]


def test_required_call_is_of_an_allowed_function(library: GrammarLibrary) -> None:
    wanted = chat(tools=THREE, tool_choice=allowed("required", "news-now", "clock"))
    wanted.check()
    grammar, names = compiled(library, wanted, "hermes"), set()
    for seed in range(NUM_WALKS):
        walk = random_walk(grammar, library.vocabulary, seed, max_tokens=400)
        calls = parsed(wanted, "hermes", walk.text.decode()).tool_calls if walk.is_finished else ()
        names |= {call.name for call in calls}
    assert names == {"news-now", "clock"}


def test_allowed_functions_are_the_only_ones_within_text(library: GrammarLibrary) -> None:
    wanted = chat(tools=THREE, tool_choice=allowed("auto", "weather"))
    wanted.check()
    matcher = compiled(library, wanted, "hermes").new_matcher()
    text = 'Well. <tool_call>\n{"name": "'
    assert all(matcher.accept(token_id) for token_id in library.vocabulary.encode(text))
    assert matcher.jump_forward_bytes().startswith(b'weather", "arguments": ')


def test_nothing_is_constrained_without_need() -> None:
    structure = TOOL_CALL_FORMATS["hermes"].structure
    assert tool_constraint(chat(tool_choice="auto"), structure, None) is None
    assert tool_constraint(chat(tool_choice="none", tools=[tool("f", strict=True)]), structure, None) is None
    assert tool_constraint(chat(tools=(), tool_choice="auto"), None, None) is None


@pytest.mark.parametrize(
    ("settings", "format_name", "problem"),
    [
        ({}, "pythonic", "a format of tool calls that grammars can force"),
        ({"tools": [tool("two words")]}, "hermes", "letters, digits"),
        ({"tools": [tool("f", strict=True)], "tool_choice": "auto"}, "llama3_json", "needs tool_choice"),
        ({"tool_choice": allowed("auto", "weather")}, "llama3_json", "the mode must be required"),
        ({"tool_choice": allowed("auto", "weather")}, "pythonic", "a format of tool calls that grammars can"),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(
    settings: dict[str, Any], format_name: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        tool_constraint(chat(**settings), TOOL_CALL_FORMATS[format_name].structure, None)


def test_forced_call_excludes_another_form() -> None:
    form = StructuredOutputsParams(json_object=True)
    with pytest.raises(InvalidRequest, match="auto or none with structured_outputs"):
        tool_constraint(chat(), TOOL_CALL_FORMATS["hermes"].structure, form)
    restricted = chat(tool_choice=allowed("auto", "weather"))
    with pytest.raises(InvalidRequest, match="auto or none with structured_outputs"):
        tool_constraint(restricted, TOOL_CALL_FORMATS["hermes"].structure, form)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tool_choice": "must"}, "must be auto, none, required, the name of a function or allowed_tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "names 'f', which is not among"),
        ({"tools": ()}, "there are no tools"),
        (
            {"tool_choice": allowed("auto", "weather", "f")},
            r"allowed_tools.tools\[1\]: names 'f', which is not",
        ),
        ({"tool_choice": allowed("auto")}, "allowed_tools.tools: are 0, must be 1 to 1024"),
        ({"tool_choice": allowed("none", "weather")}, "mode: is 'none', must be auto or required"),
        ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools: is None, must be an object"),
    ],
)
def test_wrong_tool_choice_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        chat(**settings).check()
