"""Random conversations are rendered, or refused with InvalidRequest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.client.wire.chat_messages import chat_from_message, chat_to_message
from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_template import TemplateError, prepare_rendering, render
from quire.proto import inference_pb2
from quire.proto.errors import InvalidRequest

# Reads everything that templates read, with the filters that they use.
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{{ tool.function.name }}{% endfor -%}
{%- for document in documents or [] %}{{ document.title }}{{ document | tojson(indent=2) }}{% endfor -%}
{%- for message in messages %}{{ message.role + ': ' }}{{ message.content | trim }}{{ message.name }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- for key in call.function.arguments %}{{ key }}{% endfor %}{% endfor -%}
{{ message.reasoning_content }}{{ message.tool_call_id }}{% endfor -%}
{{ option | tojson if option is defined }}{{ x }}"""

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\0"])
)
KEYS = st.sampled_from(["a", "name", "type", "function", "text", "x"]) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def mostly(draw: st.DrawFn, likely: st.SearchStrategy[Any]) -> Any:
    """Draw values of the right kind, and now and then any other."""
    return draw(VALUES if draw(st.integers(0, 15)) == 15 else likely)


NAMES = mostly(st.sampled_from(["user", "assistant", "tool", "system", "f"]))
FUNCTIONS = mostly(
    st.fixed_dictionaries(
        {"name": NAMES},
        optional={"arguments": mostly(st.just('{"a": [1]}')), "parameters": VALUES, "strict": VALUES},
    )
)
CALLS = mostly(
    st.fixed_dictionaries(
        {"function": FUNCTIONS}, optional={"id": NAMES, "type": mostly(st.just("function"))}
    )
)
PARTS = mostly(st.fixed_dictionaries({"type": mostly(st.just("text")), "text": mostly(st.text(max_size=5))}))
MESSAGES = mostly(
    st.fixed_dictionaries(
        {"role": NAMES, "content": mostly(st.text(max_size=5)) | st.lists(PARTS, max_size=3)},
        optional={
            "name": NAMES,
            "tool_calls": mostly(st.lists(CALLS, max_size=3)),
            "tool_call_id": NAMES,
            "reasoning_content": mostly(st.text(max_size=5)),
            "refusal": VALUES,
        },
    )
)
CHATS = st.builds(
    Chat,
    mostly(st.lists(MESSAGES, max_size=4)),
    continue_final_message=st.booleans(),
    template_options=mostly(st.dictionaries(st.just("option") | KEYS, VALUES, max_size=2)),
    tools=mostly(st.lists(CALLS, max_size=3)),
    tool_choice=mostly(st.sampled_from(["auto", "none"])),
    documents=mostly(st.lists(VALUES, max_size=2)),
    chat_template=st.none() | VALUES,
)


def check(chat: Chat) -> InvalidRequest | None:
    try:
        chat.check()
    except InvalidRequest as error:
        return error
    return None


@settings(max_examples=300)
@given(CHATS)
def test_any_conversation_is_rendered_or_refused(chat: Chat) -> None:
    render_or_refuse(chat)


@pytest.mark.slow
@settings(max_examples=5000)
@given(CHATS)
def test_any_of_many_conversations_is_rendered_or_refused(chat: Chat) -> None:
    render_or_refuse(chat)


def render_or_refuse(chat: Chat) -> None:
    problem = check(chat)
    if problem is not None:
        assert problem.field.startswith("chat")
        str(problem).encode()
        return
    try:
        text = render(prepare_rendering(chat, TEMPLATE, {"bos_token": "x"}), 1 << 20)
    except TemplateError as error:
        str(error).encode()
        return
    text.encode()
    received = chat_from_message(chat_to_message(chat))
    received.check()
    if not chat.template_options:  # a Struct makes numbers floating-point
        assert render(prepare_rendering(received, TEMPLATE, {"bos_token": "x"}), 1 << 20) == text


@settings(max_examples=100)
@given(st.lists(st.text(max_size=20) | VALUES.map(lambda value: json.dumps(value, default=str)), max_size=3))
def test_any_text_as_tool_is_read_or_refused(tools: list[str]) -> None:
    texts = [text.encode(errors="replace").decode() for text in tools]
    message = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")], tools=texts)
    try:
        chat = chat_from_message(message)
    except InvalidRequest:
        return
    if check(chat) is None:
        assert set(chat.parameters_by_tool) == {tool["function"]["name"] for tool in chat.tools}


def test_deep_and_wide_values_are_refused_quickly() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    user = {"role": "user", "content": "x"}
    wide: list[Any] = [None] * 2_000_000
    chats = [
        Chat([user], template_options={"option": deep}),
        Chat([user], template_options={"option": wide}),
        Chat([user], template_options={"option": 1 << 100_000}),
        Chat([user], tools=wide),
        Chat([user], documents=[{"a": deep}]),
        Chat([{"role": "user", "content": wide}]),
        Chat([{"role": "user", "content": deep}]),
        Chat([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}]),
        Chat([{**user, "content": [{"type": deep, "text": "x"}]}]),
        Chat([user], tool_choice={"a": deep}),
    ]
    for chat in chats:
        problem = check(chat)
        assert problem is not None
        assert len(str(problem)) < 500
