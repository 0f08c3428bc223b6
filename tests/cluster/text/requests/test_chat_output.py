"""Chats with tools and reasoning: the prompt, and the events of the stream."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_model import TEMPLATE
from transformers import AutoTokenizer

from quire.cluster.text.chat_format.deltas import (
    AssistantMessage,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_encoder import ChatEncoder
from quire.cluster.text.requests.output_processor import OutputProcessor
from quire.cluster.text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    RequestStarted,
    collect_output,
)
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import SequenceUpdate
from quire.cluster.text.requests.tokenizer import LocalPromptEncoder, Tokenizer
from quire.proto.codec import NO_INTS
from quire.proto.errors import InvalidRequest
from quire.proto.options.sections import ChatOptions
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Finish, FinishReason

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "When?"}
REPLY = '<think>Hm.</think>I ask.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with `<tool_call>` as a special token."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(make_model("llama"), folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    loaded.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(str(folder))


def render(tokenizer: Tokenizer, chat: Chat, **config: Any) -> str:
    encoded = ChatEncoder(ChatOptions(**config), tokenizer, LocalPromptEncoder(tokenizer)).encode(chat)
    return tokenizer.decode(encoded.token_ids.tolist(), skip_special_tokens=False)


def test_tools_and_calls_reach_the_template(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"b": 1, "a": [2]}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "now", "arguments": '{"b'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
    ]
    assert render(tokenizer, Chat(messages, tools=[TOOL])) == (
        '{"name": "now", "parameters": {"type": "object", "properties": {}}}'
        "user: One\ntwo"
        'assistant: <tool_call>now={"b": 1, "a": [2]}</tool_call><tool_call>now="{\\"b"</tool_call>'
        "tool: noonassistant:"
    )
    assert "properties" not in render(tokenizer, Chat(messages, tools=[TOOL], tool_choice="none"))


def test_template_that_appends_arguments_gets_them_as_text(tokenizer: Tokenizer) -> None:
    template = "{% for call in messages[0].tool_calls %}{{ '>' + call.function.arguments }}{% endfor %}"
    calls = [
        {"function": {"name": "now", "arguments": '{"b":  1}'}},
        {"function": {"name": "now", "arguments": {"a": "é"}}},
        {"function": {"name": "now"}},
    ]
    chat = Chat([{"role": "assistant", "tool_calls": calls}])
    assert render(tokenizer, chat, chat_template=template) == '>{"b":  1}>{"a": "é"}>{}'
    with pytest.raises(InvalidRequest, match="rejects it: no"):
        render(tokenizer, chat, chat_template="{{ raise_exception('no') }}")


def test_own_template_needs_the_operator_s_permission(tokenizer: Tokenizer) -> None:
    chat = Chat([USER], chat_template="{{ messages[0].content }}!")
    assert render(tokenizer, chat, trust_request_chat_template=True) == "When?!"
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as caught:
        render(tokenizer, chat)
    assert caught.value.field == "chat.chat_template"


def test_template_of_the_server_replaces_the_model_s(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, Chat([USER]), chat_template="{{ messages | length }}") == "1"


def test_tools_are_refused_without_a_known_format(tokenizer: Tokenizer) -> None:
    chat = Chat([USER], tools=[TOOL])
    with pytest.raises(InvalidRequest, match="needs --tool-call-parser") as caught:
        render(tokenizer, chat, chat_template="x")
    assert caught.value.field == "chat.tools"
    assert render(tokenizer, chat, chat_template="x", tool_call_parser="none") == "x"


def outputs(tokenizer: Tokenizer, chat: Chat, reply: str, reason: FinishReason, **config: Any) -> Any:
    """Return the events of a stream in which the model writes this reply, two tokens per update."""
    encoded = ChatEncoder(ChatOptions(**config), tokenizer, LocalPromptEncoder(tokenizer)).encode(chat)
    sampling = SamplingParams(max_tokens=500, skip_special_tokens=not encoded.needs_special_tokens)
    request = Request("r", NO_INTS, sampling, new_parser=encoded.new_parser)
    processor = OutputProcessor(request, tokenizer)
    token_ids = tokenizer.encode(reply, add_special_tokens=False)
    updates = [SequenceUpdate(token_ids[at : at + 2]) for at in range(0, len(token_ids), 2)]
    updates.append(SequenceUpdate(finish=Finish(0, reason)))
    events = [event for update in updates for event in processor.process(0, update)]
    started = RequestStarted("r", "tiny", 1)
    return events, collect_output(
        [started, *events], prompt=None, prompt_token_ids=None, with_prompt_logprobs=False
    ).outputs[0]


def test_stream_has_typed_deltas_that_add_up_to_the_message(tokenizer: Tokenizer) -> None:
    events, output = outputs(tokenizer, Chat([USER], tools=[TOOL]), REPLY, FinishReason.STOP)
    deltas = [delta for event in events if isinstance(event, CompletionDelta) for delta in event.chat or ()]
    kinds = list(dict.fromkeys(type(delta) for delta in deltas))
    assert kinds == [ReasoningDelta, ContentDelta, ToolCallStart, ToolCallArguments]
    assert isinstance(events[-1], CompletionFinished)
    assert output.finish_reason == events[-1].finish_reason == "tool_calls"
    assert output.text == REPLY
    message = output.message
    assert (message.content, message.reasoning_content) == ("I ask.", "Hm.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("now", '{"a": 1}')]
    assert message.tool_calls[0].id.startswith("call_")


def test_length_stays_the_reason_of_a_call_that_was_cut_off(tokenizer: Tokenizer) -> None:
    _, output = outputs(tokenizer, Chat([USER], tools=[TOOL]), REPLY[:-14], FinishReason.LENGTH)
    assert output.finish_reason == "length"
    assert [(call.name, call.arguments) for call in output.message.tool_calls] == [("now", '{"a": 1')]


def test_prompt_that_closes_the_reasoning_is_followed_by_content(tokenizer: Tokenizer) -> None:
    chat = Chat([USER], template_options={"enable_thinking": False})
    _, output = outputs(tokenizer, chat, "Yes. <tool_call>", FinishReason.STOP)
    # Without tools the special token is left out, as in other text.
    assert output.message == AssistantMessage("Yes. ")
    assert output.finish_reason == "stop"


def test_parsers_none_leave_the_text_as_content(tokenizer: Tokenizer) -> None:
    chat = Chat([USER], tools=[TOOL])
    _, output = outputs(
        tokenizer,
        chat,
        "<think>a</think>",
        FinishReason.STOP,
        tool_call_parser="none",
        reasoning_parser="none",
    )
    assert output.message == AssistantMessage("<think>a</think>")
