"""Structured outputs over HTTP, by the official clients: response_format, vLLM's field, tool_choice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from chat_model import chat_model
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, threaded_server
from narrowing import not_none

from quire import Client, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from quire.proto.errors import InvalidRequest

MESSAGES: list[Any] = [{"role": "user", "content": "When?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"const": 1}, "maxItems": 2},
    },
    "required": ["color", "sizes"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
SEEDED: Any = {"seed": 4}
RANDOM: Any = {"temperature": 1, "max_tokens": 300, **SEEDED}


@pytest.fixture(scope="module")
def client(server: ThreadedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(server: ThreadedServer) -> Iterator[Client]:
    with Client(server.server.target) as client:
        yield client


def test_chat_completion_has_the_form(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    made = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=wanted, **RANDOM)
    assert made.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(not_none(made.choices[0].message.content)), SCHEMA)


@pytest.mark.parametrize(
    "wanted",
    [
        {"structured_outputs": {"choice": ["red", "green"]}},
        {"structured_outputs": {"regex": "red|green"}},
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "red|green"}}},
    ],
)
def test_completion_has_the_form(client: openai.OpenAI, wanted: Any) -> None:
    made = client.completions.create(model="tiny", prompt="The", n=2, extra_body=wanted, **RANDOM)
    assert {choice.text for choice in made.choices} <= {"red", "green"}


def test_response_has_the_form(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "paint", "schema": SCHEMA}}
    made = client.responses.create(
        model="tiny", input="Hi", text=text, max_output_tokens=300, extra_body=SEEDED
    )
    jsonschema.validate(json.loads(made.output_text), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_tool_choice_forces_a_call(client: openai.OpenAI, choice: Any) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **RANDOM
    )
    (call,) = not_none(made.choices[0].message.tool_calls)
    assert call.type == "function"
    assert call.function.name == "paint"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert made.choices[0].finish_reason == "tool_calls"


ALLOWED = [{"type": "function", "name": "paint"}]


def _allowed_of_chat(mode: str, functions: list[dict[str, str]]) -> Any:
    tools = [{"type": each["type"], "function": {"name": each["name"]}} for each in functions]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _allowed_of_response(mode: str, functions: list[dict[str, str]]) -> Any:
    return {"type": "allowed_tools", "mode": mode, "tools": functions}


def test_allowed_tools_are_the_ones_called(client: openai.OpenAI) -> None:
    """The random model would call any of them, in chats and in responses."""
    others: Any = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c", "d")]
    chats = [
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[*others, TOOL], parallel_tool_calls=False,
            tool_choice=_allowed_of_chat("required", ALLOWED), temperature=1, max_tokens=300, seed=seed,
        ) for seed in range(3)
    ]  # fmt: skip
    names = [call.function.name for made in chats for call in not_none(made.choices[0].message.tool_calls)]  # type: ignore[union-attr]
    assert names == ["paint"] * 3
    flat: Any = [{"type": "function", **each["function"]} for each in (*others, TOOL)]
    response = client.responses.create(
        model="tiny", input="Hi", tools=flat, tool_choice=_allowed_of_response("required", ALLOWED),
        parallel_tool_calls=False, max_output_tokens=300, extra_body=SEEDED,
    )  # fmt: skip
    assert [item.name for item in response.output if item.type == "function_call"] == ["paint"]


def test_allowed_tools_leave_text_free(client: openai.OpenAI) -> None:
    choice = _allowed_of_chat("auto", ALLOWED)
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=20
    )
    assert made.choices[0].message.content
    assert not made.choices[0].message.tool_calls


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_must_be_tools(client: openai.OpenAI, mode: str) -> None:
    unknown = [*ALLOWED, {"type": "function", "name": "draw"}]
    flat: Any = [{"type": "function", **TOOL["function"]}]
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[1\]: names 'draw', which is not among the tools"
    ):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=_allowed_of_chat(mode, unknown)
        )
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[1\]: names 'draw', which is not among the tools"
    ):
        client.responses.create(
            model="tiny",
            input="Hi",
            tools=flat,
            tool_choice=_allowed_of_response(mode, unknown),
        )


def test_response_may_be_forced_to_call_a_function(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}
    made = client.responses.create(
        model="tiny",
        input="Hi",
        tools=[tool],
        tool_choice={"type": "function", "name": "paint"},
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body=SEEDED,
    )
    (call,) = (item for item in made.output if item.type == "function_call")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_anthropic_message_uses_the_tool(server: ThreadedServer) -> None:
    import anthropic  # takes 1.4 s

    tool: Any = {"name": "paint", "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        made = client.messages.create(
            model="tiny",
            max_tokens=300,
            messages=MESSAGES,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_body=SEEDED,
        )
    (block,) = (block for block in made.content if block.type == "tool_use")
    jsonschema.validate(block.input, SCHEMA)
    assert made.stop_reason == "tool_use"


def test_budget_ends_the_reasoning(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Over both APIs. The prompt leaves the random model in a reasoning that it never ends by itself."""
    model = chat_model(make_model("llama"), tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<think>")
    params = SamplingParams(temperature=1, seed=4, max_tokens=60, thinking_token_budget=4, ignore_eos=True)
    settings: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "max_tokens": 60, "seed": 4}
    with (
        threaded_server(model, reasoning_parser="qwen3") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        Client(server.server.target) as grpc_client,
    ):
        free = client.chat.completions.create(**settings, extra_body={"ignore_eos": True})
        assert not free.choices[0].message.content
        limits = {"ignore_eos": True, "thinking_token_budget": 4}
        made = client.chat.completions.create(**settings, extra_body=limits).choices[0].message
        assert made.content
        (output,) = grpc_client.chat(MESSAGES, params).outputs
        assert not_none(output.message).content == made.content
        body = {"model": "tiny", "max_tokens": 60, "messages": MESSAGES, "temperature": 1}
        for thinking, has_reply in (
            ({"type": "enabled", "budget_tokens": 4}, True),
            ({"type": "disabled", "budget_tokens": 4}, False),
            ({"type": "enabled"}, False),
        ):
            answered = httpx.post(
                f"{server.url}/v1/messages", json=body | {"thinking": thinking}, timeout=CALL_TIMEOUT_S
            ).json()
            kinds = [block["type"] for block in answered["content"]]
            assert ("text" in kinds) == has_reply, answered


def test_budget_of_a_model_that_does_not_reason_is_refused(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    refusal = r"thinking_token_budget.*not known to reason"
    params = SamplingParams(thinking_token_budget=4)
    limits: Any = {"thinking_token_budget": 4}
    with (
        threaded_server(chat_model(make_model("llama"), tmp_path), reasoning_parser="none") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        Client(server.server.target) as grpc_client,
    ):
        with pytest.raises(openai.BadRequestError, match=refusal):
            client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=limits)
        with pytest.raises(openai.BadRequestError, match=refusal):
            client.completions.create(model="tiny", prompt="The", extra_body=limits)
        thinking = {"type": "enabled", "budget_tokens": 4}
        body = {"model": "tiny", "max_tokens": 60, "messages": MESSAGES, "thinking": thinking}
        answered = httpx.post(f"{server.url}/v1/messages", json=body, timeout=CALL_TIMEOUT_S)
        assert answered.status_code == 400
        assert re.search(r"thinking\.budget_tokens: .*not known to reason", answered.text)
        with pytest.raises(InvalidRequest, match=refusal):
            grpc_client.generate("The", params)
        with pytest.raises(InvalidRequest, match=refusal):
            grpc_client.chat(MESSAGES, params)


def test_repetition_ends_the_output(client: openai.OpenAI, grpc_client: Client) -> None:
    limits = {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 4}
    form = "(ab ){50}"
    wanted: Any = {"structured_outputs": {"regex": form}, "repetition_detection": limits}
    made = client.completions.create(model="tiny", prompt="The", extra_body=wanted, **RANDOM)
    assert made.choices[0].finish_reason == "repetition"
    params = SamplingParams(
        temperature=1, seed=4, max_tokens=300, structured_outputs=StructuredOutputsParams(regex=form),
        repetition_detection=RepetitionDetectionParams(8, 1, 4),
    )  # fmt: skip
    (output,) = grpc_client.generate("The", params).outputs
    assert output.finish_reason == "repetition"
    assert output.text == made.choices[0].text
    assert len(output.text) < 50
