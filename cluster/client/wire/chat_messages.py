"""Conversions of conversations, and of parsed output, between quire.v1 and Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import struct_pb2

from ....proto import inference_pb2
from ....proto.errors import InvalidRequest, ProtocolError
from ....proto.options.values import MAX_FRAMES
from ...text.chat_format.deltas import (
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from ...text.media.image_source import ImageError
from ...text.requests.chat import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    Chat,
    allowed_tools,
    is_allowed_tools,
)
from ...text.requests.chat_messages import Message, media_kind, read_media
from ...text.requests.json_values import MAX_VALUES, JsonSize
from .message_fields import from_message, to_message

# Content parts and tool calls of a conversation, which are counted before any is converted.
MAX_TOTAL_PARTS = 16384

_MODES = {
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_MODE_NAMES = {number: name for name, number in _MODES.items()}
_MESSAGE_TEXTS = "content", "name", "tool_call_id", "reasoning_content"
_CHAT_FLAGS = "chat_template", "parallel_tool_calls", "add_generation_prompt"


def chat_to_message(chat: Chat) -> inference_pb2.Chat:
    """`chat` must have been checked."""
    message = inference_pb2.Chat(
        messages=map(_message_to_proto, chat.messages),
        continue_final_message=chat.continue_final_message,
        tools=map(_dump, chat.tools),
        documents=map(_dump, chat.documents),
        tool_choice=_tool_choice_to_message(chat),
        **{name: getattr(chat, name) for name in _CHAT_FLAGS},
    )
    message.template_options.update(chat.template_options)
    if chat.image_settings:
        message.image_settings = _dump(chat.image_settings)
    return message


def chat_from_message(message: inference_pb2.Chat) -> Chat:
    """Raises InvalidRequest for too many entries, and for text that is not JSON."""
    for name, most in (("messages", MAX_MESSAGES), ("tools", MAX_TOOLS), ("documents", MAX_DOCUMENTS)):
        count = len(getattr(message, name))
        if count > most:
            raise InvalidRequest(f"chat.{name}", f"are {count}, must be at most {most}")
    num_parts = sum(len(part.content_parts) + len(part.tool_calls) for part in message.messages)
    if num_parts > MAX_TOTAL_PARTS:
        raise InvalidRequest("chat.messages", f"have {num_parts} parts, must be at most {MAX_TOTAL_PARTS}")
    for name in ("tools", "documents"):
        _check_size(f"chat.{name}", getattr(message, name))
    return Chat(
        messages=[_message_from_proto(part) for part in message.messages],
        continue_final_message=message.continue_final_message,
        template_options=_StructReader("chat.template_options").read(message.template_options),
        tools=[_load(f"chat.tools[{index}]", text) for index, text in enumerate(message.tools)],
        documents=[_load(f"chat.documents[{index}]", text) for index, text in enumerate(message.documents)],
        tool_choice=_tool_choice(message.tool_choice),
        image_settings=_load("chat.image_settings", message.image_settings) if message.image_settings else {},
        **{name: getattr(message, name) for name in _CHAT_FLAGS if message.HasField(name)},
    )


def deltas_to_message(deltas: Iterable[ChatDelta]) -> inference_pb2.ChatUpdate:
    return inference_pb2.ChatUpdate(deltas=map(_delta_to_message, deltas))


def deltas_from_message(message: inference_pb2.ChatUpdate) -> tuple[ChatDelta, ...]:
    """Raises ProtocolError for a delta that only later versions of quire have."""
    return tuple(map(_delta_from_message, message.deltas))


def _message_to_proto(message: Message) -> inference_pb2.ChatMessage:
    content, reasoning = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    texts = {name: message.get(name) for name in ("name", "tool_call_id")}
    parts = () if content is None or isinstance(content, str) else content
    return inference_pb2.ChatMessage(
        role=message["role"],
        content=content if isinstance(content, str) else None,
        content_parts=list(map(_part_to_proto, parts)),
        tool_calls=map(_call_to_proto, message.get("tool_calls") or ()),
        reasoning_content=reasoning,
        **texts,
    )


def _part_to_proto(part: str | Mapping[str, Any]) -> inference_pb2.ContentPart:
    if isinstance(part, str):
        return inference_pb2.ContentPart(text=part)
    if media_kind(part) is None:
        return inference_pb2.ContentPart(text=part["text"])
    image = read_media("chat.messages.content", part)
    if image.is_remote:
        return inference_pb2.ContentPart(image=inference_pb2.Image(url=image.url, detail=image.detail))
    try:
        if image.kind == "video":
            frames = [frame.file() for frame in image.frame_sources()]
            return inference_pb2.ContentPart(video=inference_pb2.Video(frames=frames))
        data = image.file()
    except ImageError as error:
        raise InvalidRequest("chat.messages.content", str(error)) from error
    return inference_pb2.ContentPart(image=inference_pb2.Image(data=data, detail=image.detail))


def _part_from_proto(part: inference_pb2.ContentPart) -> dict[str, Any]:
    if part.WhichOneof("part") == "video":
        if len(part.video.frames) > MAX_FRAMES:
            problem = f"has {len(part.video.frames)} frames, must have at most {MAX_FRAMES}"
            raise InvalidRequest("chat.messages.content", problem)
        return {"type": "video", "video": list(part.video.frames)}
    if part.WhichOneof("part") != "image":
        return {"type": "text", "text": part.text}
    source, detail = part.image.WhichOneof("source"), part.image.detail or "auto"
    return {"type": "image", "image": getattr(part.image, source) if source else None, "detail": detail}


def _call_to_proto(call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    function = call["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _dump(arguments or {})
    return inference_pb2.ToolCall(id=call.get("id") or "", name=function["name"], arguments=text)


def _message_from_proto(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    plain |= {name: getattr(message, name) for name in _MESSAGE_TEXTS if message.HasField(name)}
    if message.content_parts:
        plain["content"] = list(map(_part_from_proto, message.content_parts))
    if message.tool_calls:
        plain["tool_calls"] = [_call_from_proto(call) for call in message.tool_calls]
    elif not message.HasField("reasoning_content"):
        plain.setdefault("content", "")  # clients of the first version do not send an empty content
    return plain


def _call_from_proto(call: inference_pb2.ToolCall) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return {"id": call.id, **plain} if call.id else plain


def _tool_choice_to_message(chat: Chat) -> inference_pb2.ToolChoice:
    choice = chat.choice
    mode = _MODES[choice.mode]
    if choice.names is None:
        return inference_pb2.ToolChoice(mode=mode)
    if is_allowed_tools(chat.tool_choice):
        allowed = inference_pb2.AllowedTools(mode=mode, functions=choice.names)
        return inference_pb2.ToolChoice(allowed=allowed)
    return inference_pb2.ToolChoice(function=choice.names[0])


def _tool_choice(message: inference_pb2.ToolChoice) -> str | dict[str, Any]:
    kind = message.WhichOneof("choice")
    if kind == "function":
        return _named(message.function)
    if kind == "allowed":
        mode = _MODE_NAMES.get(message.allowed.mode, "auto")
        return allowed_tools(mode, list(map(_named, message.allowed.functions)))
    return _MODE_NAMES.get(message.mode, "auto")


def _named(function: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function}}


class _StructReader:
    """Converts a Struct to plain values. Numbers stay as they are, also those that JSON does not have."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._num_values = 0

    def read(self, message: struct_pb2.Struct) -> dict[str, Any]:
        """Raises InvalidRequest for more than MAX_VALUES values."""
        return {name: self._value(value) for name, value in message.fields.items()}

    def _value(self, value: struct_pb2.Value) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InvalidRequest(self._field, f"has more than {MAX_VALUES} values")
        kind = value.WhichOneof("kind")
        if kind == "struct_value":
            return self.read(value.struct_value)
        if kind == "list_value":
            return [self._value(member) for member in value.list_value.values]
        return None if kind in (None, "null_value") else getattr(value, kind)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_size(field: str, texts: Iterable[str]) -> None:
    """Raise InvalidRequest for too many values: parsing 4 MB of empty lists takes 240 ms in the event loop."""
    size = JsonSize(MAX_VALUES)
    for text in texts:
        size.add(text.encode())
    if size.is_too_large:
        raise InvalidRequest(field, f"has more than {size.limits}")


def _load(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from error


def _delta_to_message(delta: ChatDelta) -> inference_pb2.ChatDelta:
    if isinstance(delta, ContentDelta):
        return inference_pb2.ChatDelta(content=delta.text)
    if isinstance(delta, ReasoningDelta):
        return inference_pb2.ChatDelta(reasoning_content=delta.text)
    if isinstance(delta, ToolCallStart):
        return inference_pb2.ChatDelta(tool_call=to_message(inference_pb2.ToolCallStart, delta))
    return inference_pb2.ChatDelta(arguments=to_message(inference_pb2.ToolCallArguments, delta))


def _delta_from_message(message: inference_pb2.ChatDelta) -> ChatDelta:
    kind = message.WhichOneof("delta")
    if kind == "content":
        return ContentDelta(message.content)
    if kind == "reasoning_content":
        return ReasoningDelta(message.reasoning_content)
    if kind == "tool_call":
        return from_message(ToolCallStart, message.tool_call)
    if kind == "arguments":
        return from_message(ToolCallArguments, message.arguments)
    raise ProtocolError("the server sent a delta of a chat that this version of the client does not support")
