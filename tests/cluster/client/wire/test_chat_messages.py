"""Conversations and parsed output survive the way over quire.v1."""

from __future__ import annotations

from typing import Any

import pytest
from chat_outputs import WEATHER, parse

from quire.cluster.client.wire.chat_messages import (
    MAX_TOTAL_PARTS,
    chat_from_message,
    chat_to_message,
    deltas_from_message,
    deltas_to_message,
)
from quire.cluster.client.wire.message_fields import from_message, to_message
from quire.cluster.text.chat_format.deltas import AssistantMessage
from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_messages import ContentForm
from quire.proto import inference_pb2
from quire.proto.errors import InvalidRequest

TOOL = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Weather?", "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "content": "", "tool_call_id": "c1"},
]


def test_chat_survives_the_way_over_protobuf() -> None:
    chat = Chat(
        MESSAGES,
        template_options={"enable_thinking": False, "x": [1.5, None, {"y": "z"}]},
        tools=[TOOL],
        tool_choice="none",
        parallel_tool_calls=False,
        documents=[{"title": "A", "text": "b", "page": 1}],
        chat_template="{{ 1 }}",
        add_generation_prompt=False,
    )
    chat.check()
    received = chat_from_message(chat_to_message(chat))
    form = ContentForm(none_content=True)
    assert received.template_messages(form) == chat.template_messages(form)
    for name in ("template_options", "tools", "tool_choice", "parallel_tool_calls", "documents"):
        assert getattr(received, name) == getattr(chat, name), name
    assert (received.chat_template, received.add_generation_prompt) == ("{{ 1 }}", False)
    assert list(received.tools[0]["function"]) == ["name", "strict", "parameters"]  # in order


def test_defaults_survive_the_way_over_protobuf() -> None:
    assert chat_from_message(chat_to_message(Chat([{"role": "user", "content": ""}]))) == Chat(
        [{"role": "user", "content": ""}], template_options={}, tools=[], documents=[]
    )


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "get_weather"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "get_weather"}}],
            },
        },
    ],
)
def test_tool_choice_survives_the_way_over_protobuf(choice: Any) -> None:
    chat = Chat([{"role": "user", "content": ""}], tools=[TOOL], tool_choice=choice)
    chat.check()
    assert chat_from_message(chat_to_message(chat)).tool_choice == choice


def _chat(**fields: Any) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")], **fields)


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        (_chat(tools=["{"]), "chat.tools[0]", "is not JSON"),
        (_chat(tools=["[" * 100_000]), "chat.tools[0]", "is not JSON"),
        (_chat(tools=["5"]), "chat.tools[0]", "is 5, must be an object"),
        (_chat(documents=['{"a": NaN}']), "chat.documents", "has nan, must be finite"),
        (_chat(tools=["{}"] * 2000), "chat.tools", "are 2000"),
        (
            inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user")] * 1_900_000),
            "chat.messages",
            "are 1900000",
        ),
        (
            inference_pb2.Chat(
                messages=[
                    inference_pb2.ChatMessage(
                        role="user",
                        content_parts=[inference_pb2.ContentPart(text="x")] * (MAX_TOTAL_PARTS + 1),
                    )
                ]
            ),
            "chat.messages",
            f"have {MAX_TOTAL_PARTS + 1} parts",
        ),
        (
            _chat(tool_choice=inference_pb2.ToolChoice(mode=inference_pb2.TOOL_CHOICE_MODE_REQUIRED)),
            "chat.tool_choice",
            "is 'required', but there are no tools",
        ),
        (
            _chat(tool_choice=inference_pb2.ToolChoice(function="f")),
            "chat.tool_choice",
            "names 'f', which is not among the tools",
        ),
    ],
)
def test_invalid_message_is_refused(message: inference_pb2.Chat, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        chat_from_message(message).check()
    assert caught.value.field == field


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused_in_template_options(number: float) -> None:
    message = _chat()
    message.template_options["x"] = number
    with pytest.raises(InvalidRequest, match="must be finite") as caught:
        chat_from_message(message).check()
    assert caught.value.field == "chat.template_options['x']"


def test_parsed_output_survives_the_way_over_protobuf() -> None:
    deltas, message = parse(
        ['<think>Hm.</think>Yes.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'],
        "hermes",
        "qwen3",
    )
    assert len(deltas) == 4
    assert list(deltas_from_message(deltas_to_message(deltas))) == deltas
    assert from_message(AssistantMessage, to_message(inference_pb2.AssistantMessage, message)) == message


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_json_texts_of_many_values_are_refused_before_they_are_parsed(name: str) -> None:
    text = "[" + "[], " * 60_000 + "[]]"
    message = inference_pb2.Chat()
    getattr(message, name).append(text)
    (read,) = getattr(chat_from_message(message), name)
    assert len(read) == 60_001
    getattr(message, name).append(text)
    with pytest.raises(InvalidRequest, match=rf"chat\.{name}: has more than 100000 texts and lists"):
        chat_from_message(message)


def test_videos_round_trip_as_the_files_of_their_frames() -> None:
    content = [
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,Zmls,ZmlsZQ=="}},
        {"type": "video", "video": [b"file", b"other"]},
    ]
    chat = Chat([{"role": "user", "content": content}])
    chat.check()
    received = chat_from_message(chat_to_message(chat))
    received.check()
    frames = [(video.kind, video.frames) for _, video in received.images]
    assert frames == [("video", (b"fil", b"file")), ("video", (b"file", b"other"))]
    nothing = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content_parts=[
        inference_pb2.ContentPart(video=inference_pb2.Video())])])  # fmt: skip
    with pytest.raises(InvalidRequest, match="must be the frames of a video"):
        chat_from_message(nothing).check()
    nothing.messages[0].content_parts[0].video.frames.extend([b""] * 769)
    with pytest.raises(InvalidRequest, match="has 769 frames, must have at most 768"):
        chat_from_message(nothing)


def test_images_round_trip_as_files_and_urls() -> None:
    content = [
        {"type": "text", "text": "see"},
        {"type": "image", "image": b"file", "detail": "low"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZmlsZQ=="}},
        {"type": "input_image", "image_url": "https://images.example/a.png"},
    ]
    chat = Chat([{"role": "user", "content": content}], image_settings={"max_pixels": 4096})
    chat.check()
    received = chat_from_message(chat_to_message(chat))
    received.check()
    assert received.image_settings == {"max_pixels": 4096}
    assert [(image.data, image.url, image.detail) for _, image in received.images] == [
        (b"file", "", "low"),
        (b"file", "", "auto"),
        (b"", "https://images.example/a.png", "auto"),
    ]
    nothing = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content_parts=[
        inference_pb2.ContentPart(image=inference_pb2.Image())])])  # fmt: skip
    with pytest.raises(InvalidRequest, match="must be the URL of an image"):
        chat_from_message(nothing).check()
