"""Messages of a conversation in the form of OpenAI's API: checks, images, and the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....proto.errors import InvalidRequest
from ....proto.vision import MediaKind
from ..media.image_source import DETAILS, FRAME_HEADERS, ImageSource
from .json_values import check_count, check_json, check_mapping, check_text, show_value

MAX_PARTS = 1024  # of one message's content
MAX_CALLS = 128  # tool calls of one message
MAX_NAME_CHARS = 256  # of roles, functions, participants and ids of calls

MAX_URL_CHARS = 8192  # of an image that is elsewhere

# ``{"role": ..., "content": ...}``, with a role that the model's template supports.
Message = Mapping[str, Any]

# Members of OpenAI's messages that a prompt would need, and no template reads. Others that clients send back, also
# those of other servers, are ignored.
_REFUSED = ("audio", "function_call")
_REFUSED_MEDIA = ("audio", "file")
_NAMES = ("name", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning")


def check_message(field: str, message: object) -> None:
    message = check_mapping(field, message)
    if "role" not in message:
        raise InvalidRequest(field, "must have role and content")
    for name in _REFUSED:
        if message.get(name):
            raise InvalidRequest(field, f"has {name!r}, must have content or tool_calls instead")
    check_text(f"{field}.role", message["role"], MAX_NAME_CHARS)
    if not message["role"]:
        raise InvalidRequest(f"{field}.role", f"has 0 characters, 1 to {MAX_NAME_CHARS}")
    for name in _NAMES:
        if message.get(name) is not None:
            check_text(f"{field}.{name}", message[name], MAX_NAME_CHARS)
    for name in _REASONING:
        if message.get(name) is not None:
            check_text(f"{field}.{name}", message[name])
    calls = message.get("tool_calls") or ()
    _check_calls(f"{field}.tool_calls", calls)
    if message.get("content") is None:
        if not calls and not message.get("reasoning_content") and not message.get("reasoning"):
            raise InvalidRequest(
                field, "must have role and content; content may be null only beside tool_calls"
            )
    else:
        _check_content(f"{field}.content", message["content"])


def _check_content(field: str, content: object) -> None:
    if isinstance(content, str):
        check_text(field, content)
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(field, f"is {show_value(content)}, must be text or a list of parts")
    check_count(field, content, 0, MAX_PARTS)
    for index, part in enumerate(content):
        _check_part(f"{field}[{index}]", part)


def _check_part(field: str, part: object) -> None:
    if isinstance(part, str):
        check_text(field, part)
        return
    part = check_mapping(field, part)
    kind = part.get("type", "text")
    if media_kind(part) is not None:
        read_media(field, part)
    elif kind != "text":
        named = isinstance(kind, str) and next((name for name in _REFUSED_MEDIA if name in kind), None)
        reason = f": {named} is not supported" if named else ""
        raise InvalidRequest(
            f"{field}.type", f"is {show_value(kind)}, must be text, image_url or video_url{reason}"
        )
    else:
        check_text(f"{field}.text", part.get("text"))


# Types of parts that are images: OpenAI's of the two APIs, and those of transformers and vLLM in Python. Likewise of
# videos.
_KINDS: Mapping[object, MediaKind] = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_pil"), "image"),
    **dict.fromkeys(("video_url", "video"), "video"),
}


def media_kind(part: Any) -> MediaKind | None:
    """Return whether a part of a content is an image or a video; None for text."""
    kind = None if isinstance(part, str) else part.get("type")
    return _KINDS.get(kind) if isinstance(kind, str) else None


def read_media(field: str, part: Mapping[str, Any]) -> ImageSource:
    """Return the image or the video of a part of a content.

    Raises:
        InvalidRequest: the part has none, or its URL has another form.
    """
    if media_kind(part) == "video":
        return _read_video(field, part)
    kind = part["type"]
    value = next((part[name] for name in (kind, "image_url", "url") if part.get(name) is not None), None)
    if isinstance(value, ImageSource):
        return value
    detail = part.get("detail")
    if isinstance(value, Mapping):
        detail, value = value.get("detail", detail), value.get("url")
    detail = "auto" if detail in (None, "original") else detail
    if detail not in DETAILS:
        raise InvalidRequest(
            f"{field}.detail", f"is {show_value(detail)}, must be one of {', '.join(DETAILS)}"
        )
    if type(value).__module__.partition(".")[0] == "PIL":
        return ImageSource(image=value, detail=detail)
    if isinstance(value, bytes):
        return ImageSource(data=value, detail=detail)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{kind}", f"is {show_value(value)}, must be the URL of an image")
    source = ImageSource(url=value, detail=detail)
    if not source.is_remote:
        _check_ascii(f"{field}.{kind}", value)
    else:
        check_text(f"{field}.{kind}", value, MAX_URL_CHARS)
        if not value.lower().startswith(("https://", "http://")):
            raise InvalidRequest(f"{field}.{kind}", f"is {show_value(value)}, must be a data: or https: URL")
    return source


def _read_video(field: str, part: Mapping[str, Any]) -> ImageSource:
    kind = part["type"]
    value = next((part[name] for name in (kind, "video_url", "url") if part.get(name) is not None), None)
    if isinstance(value, ImageSource):
        return value
    if isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, list | tuple):
        if not value or not all(is_frame(each) for each in value):
            raise InvalidRequest(
                f"{field}.{kind}", "must be the frames of a video: images of PIL or files of images"
            )
        return ImageSource(kind="video", frames=tuple(value))
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{kind}", f"is {show_value(value)}, must be the URL of a video")
    if not value.startswith(FRAME_HEADERS):
        raise InvalidRequest(
            f"{field}.{kind}",
            f"is {show_value(value)}, must be {FRAME_HEADERS[0]} and the frames in base64 with commas between them; "
            "files of videos such as MP4 are not decoded",
        )
    _check_ascii(f"{field}.{kind}", value)
    return ImageSource(kind="video", url=value)


def _check_ascii(field: str, url: str) -> None:
    """Raise InvalidRequest for a data URL that no process can be sent."""
    if not url.isascii():
        raise InvalidRequest(field, "has wrong base64: characters other than ASCII")


def is_frame(value: object) -> bool:
    """Return whether a value is an image of PIL or the content of a file."""
    return isinstance(value, bytes) or type(value).__module__.partition(".")[0] == "PIL"


def message_images(field: str, message: Message) -> Iterator[tuple[str, ImageSource]]:
    """Yield the images and videos of a checked message, each with the name of its place."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if media_kind(part) is not None:
            yield f"{field}.content[{index}]", read_media(f"{field}.content[{index}]", part)


def _check_calls(field: str, calls: object) -> None:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequest(field, f"is {show_value(calls)}, must be a list")
    check_count(field, calls, 0, MAX_CALLS)
    for index, call in enumerate(calls):
        _check_call(f"{field}[{index}]", call)


def _check_call(field: str, call: object) -> None:
    call = check_mapping(field, call)
    if call.get("id") is not None:
        check_text(f"{field}.id", call["id"], MAX_NAME_CHARS)
    function = check_function(field, call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        check_text(f"{field}.function.arguments", arguments)
    elif arguments is not None:
        check_mapping(f"{field}.function.arguments", arguments)
        check_json(f"{field}.function.arguments", arguments)


def check_function(field: str, owner: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = owner.get("type", "function")
    if kind != "function":
        raise InvalidRequest(f"{field}.type", f"is {show_value(kind)}, must be function")
    function = check_mapping(f"{field}.function", owner.get("function"))
    name = function.get("name")
    check_text(f"{field}.function.name", name, MAX_NAME_CHARS)
    if not name:
        raise InvalidRequest(f"{field}.function.name", "is empty")
    return function


def message_texts(message: Message) -> Iterator[str]:
    """Yield the texts of a checked message."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
        yield _part_text(part)
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            yield arguments
    for name in _REASONING:
        yield message.get(name) or ""


def _part_text(part: Any, media_texts: Mapping[str, str] | None = None) -> str:
    if isinstance(part, str):
        return part
    kind = media_kind(part)
    return str(part["text"]) if kind is None else (media_texts or {}).get(kind, "")


@dataclass(frozen=True, slots=True)
class ContentForm:
    """The form in which a template reads the content of a message.

    Attributes:
        none_content: a message without content has None instead of the empty text.
        as_parts: a list of parts stays one, ``{"type": "image"}``, a video or a text each; otherwise they are joined.
        texts_as_parts: a content of text is a list of one part too.
        media_texts: ``image`` or ``video`` |-> text in the place of one where parts are joined.
    """

    none_content: bool = False
    as_parts: bool = False
    texts_as_parts: bool = False
    media_texts: Mapping[str, str] = field(default_factory=dict)


def template_message(message: Message, *, form: ContentForm, arguments_as_text: bool) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message["role"], "content": _content(message, form)}
    for name in _NAMES:
        if message.get(name) is not None:
            rendered[name] = message[name]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        rendered["reasoning_content"] = rendered["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [_template_call(call, arguments_as_text) for call in calls]
    return rendered


def _content(message: Message, form: ContentForm) -> Any:
    content = message.get("content")
    if content is None:
        return None if form.none_content else ""
    if isinstance(content, str):
        return [_text_part(content)] if form.texts_as_parts else content
    if not form.as_parts:
        return "\n".join(_part_text(part, form.media_texts) for part in content)
    kinds = map(media_kind, content)
    return [
        _text_part(_part_text(part)) if kind is None else {"type": kind}
        for kind, part in zip(kinds, content, strict=True)
    ]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _template_call(call: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if not arguments_as_text:
        arguments = _parse_arguments(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    rendered: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if call.get("id") is not None:
        rendered["id"] = call["id"]
    return rendered


def _parse_arguments(arguments: Any) -> Any:
    """Return the arguments as a dictionary; text that is not a JSON object stays as the model wrote it."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
        check_json("arguments", parsed)
    except (ValueError, RecursionError, InvalidRequest):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
