"""The official anthropic package against the HTTP server: messages, plain and streamed, tools and thinking."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from chat_model import write_output
from local_server import ThreadedServer

if TYPE_CHECKING:
    from anthropic import Anthropic

MESSAGES: list[Any] = [{"role": "user", "content": "When?"}]
TOOL: Any = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}
REPLY = '<think>Hm.</think>I ask.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    """Import the package, which takes 1.4 s, only in the process that runs these tests."""
    import anthropic

    return anthropic


@pytest.fixture(scope="module")
def client(server: ThreadedServer, anthropic: ModuleType) -> Iterator[Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_message_has_thinking_text_and_tool_use(server: ThreadedServer, client: Anthropic) -> None:
    write_output(server, REPLY)
    made: Any = client.messages.create(
        model="tiny", max_tokens=100, system="Be brief.", messages=MESSAGES, tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": 99},
    )  # fmt: skip
    thinking, text, tool_use = made.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "I ask.")
    assert (tool_use.type, tool_use.name, tool_use.input) == ("tool_use", "now", {"a": 1})
    assert (made.stop_reason, made.stop_sequence) == ("tool_use", None)
    write_output(server, "Noon.")
    result: Any = {
        "type": "tool_result",
        "tool_use_id": tool_use.id,
        "content": [{"type": "text", "text": "12"}],
    }
    conversation: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    answered: Any = client.messages.create(model="tiny", max_tokens=100, messages=conversation, tools=[TOOL])
    assert answered.content[0].text == "Noon."
    assert answered.stop_reason == "end_turn"


def test_stream_adds_up_to_the_message(server: ThreadedServer, client: Anthropic) -> None:
    write_output(server, REPLY)
    with client.messages.stream(model="tiny", max_tokens=100, messages=MESSAGES, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "signature" in kinds  # of the thinking
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[1].text == "I ask."
    assert final.content[2].input == {"a": 1}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 10


def test_stop_sequence_and_max_tokens_are_reported(server: ThreadedServer, client: Anthropic) -> None:
    write_output(server, "One two three")
    made: Any = client.messages.create(
        model="tiny", max_tokens=100, messages=MESSAGES, stop_sequences=["two"]
    )
    assert (made.content[0].text, made.stop_reason, made.stop_sequence) == ("One ", "stop_sequence", "two")
    write_output(server, "One two three")
    greedy = {"temperature": 0, "top_k": 5, "top_p": 0.9}
    cut = client.messages.create(model="tiny", max_tokens=2, messages=MESSAGES, extra_body=greedy)
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 2


def test_count_tokens_equals_the_usage(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be brief.", tools=[TOOL])
    made = client.messages.create(
        model="tiny", max_tokens=1, messages=MESSAGES, system="Be brief.", tools=[TOOL]
    )
    cached = made.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == made.usage.input_tokens + cached


def test_documents_of_text_are_text(client: Anthropic) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Noon."}
    nested = {"type": "content", "content": [{"type": "text", "text": "Noon."}]}
    count: Any = client.messages.count_tokens
    counts = {
        count(model="tiny", messages=[{"role": "user", "content": [block]}]).input_tokens
        for block in (
            {"type": "document", "source": source, "title": "It"},
            {"type": "document", "source": nested, "title": "It"},
            {"type": "text", "text": "It\nNoon."},
        )
    }
    assert len(counts) == 1


async def test_async_client_streams(server: ThreadedServer, anthropic: ModuleType) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        await asyncio.to_thread(write_output, server, "Well.")
        async with client.messages.stream(model="tiny", max_tokens=9, messages=MESSAGES) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Well."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens: is 0, must be at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: is missing"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"extra_body": {"temperature": 1.5}}, "temperature: is 1.5"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens: is 5"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: is 0"),
        ({"thinking": {"type": "some"}}, "thinking.type: is 'some'"),
        ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers: is not supported"),
        ({"extra_body": {"max_token": 3}}, "did you mean 'max_tokens'"),
    ],
)
def test_errors_have_the_form_of_anthropic(
    client: Anthropic, anthropic: ModuleType, options: dict[str, Any], said: str
) -> None:
    create: Any = client.messages.create
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(**({"model": "tiny", "max_tokens": 5, "messages": MESSAGES} | options))
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]


def test_unknown_model_is_not_found(client: Anthropic, anthropic: ModuleType) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=MESSAGES)
