"""The forms in which LLM takes prompts (text, token ids, a Chat, and vLLM's dictionaries) and adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from ...proto import coerce
from ...proto.errors import InvalidRequest, InvalidType
from ...proto.lora import MAX_LORA_NAME_CHARS, MAX_LORA_PATH_CHARS, LoraReference
from ..text.media.image_source import ImageSource
from ..text.requests.chat import Chat
from ..text.requests.prompt_images import ImagePrompt
from ..text.requests.request import Prompt

_SEQUENCES = (Sequence, np.ndarray)


class MultiModalData(TypedDict):
    """The images and videos of a prompt, each kind in the order of its placeholders; as in vLLM.

    Attributes:
        image: a PIL.Image, or a list of them.
        video: the frames of a video, a list of PIL.Image, or a list of videos.
    """

    image: NotRequired[Any]
    video: NotRequired[Any]


class TextPrompt(TypedDict):
    """A text with options of its own, as in vLLM.

    With images it has the model's placeholder once for each, for example ``<|image_pad|>``.
    """

    prompt: str
    multi_modal_data: NotRequired[MultiModalData]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids with options of their own, as in vLLM; `prompt` is their text for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    multi_modal_data: NotRequired[MultiModalData]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


PromptInput = Prompt | TextPrompt | TokensPrompt
# vLLM's name of it.
PromptType = PromptInput


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in one form.

    Attributes:
        text: the text in the output; None without one.
        cache_salt: None if the prompt names none.
    """

    prompt: Prompt | ImagePrompt
    text: str | None
    cache_salt: str | None = None


def read_prompts(prompts: Any) -> list[ReadPrompt]:
    """Return one PromptInput or a sequence of them.

    Raises:
        InvalidRequest: a prompt has another form.
    """
    if _is_token_ids(prompts) or isinstance(prompts, str | Chat | Mapping):
        return [_read_prompt("prompts", prompts)]
    if not isinstance(prompts, _SEQUENCES):
        kind = type(prompts).__name__
        raise InvalidType(
            "prompts", f"is of type {kind}, must be text, token ids, a dict, a Chat or a list of such"
        )
    return [_read_prompt(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _read_prompt(field: str, prompt: Any) -> ReadPrompt:
    if isinstance(prompt, Mapping):
        return _read_mapping(field, prompt)
    if isinstance(prompt, str):
        return ReadPrompt(prompt, prompt)
    if isinstance(prompt, (Chat, *_SEQUENCES)) and not isinstance(prompt, bytes):
        return ReadPrompt(cast(Prompt, prompt), None)
    kind = type(prompt).__name__
    raise InvalidType(field, f"is of type {kind}, must be text, token ids, a dict or a Chat")


def _read_mapping(field: str, prompt: Mapping[str, Any]) -> ReadPrompt:
    known = {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs"}
    unknown = sorted(str(name) for name, value in prompt.items() if name not in known and value is not None)
    if unknown:
        raise InvalidRequest(
            field,
            f"has {', '.join(unknown)}, must have prompt or prompt_token_ids, and multi_modal_data, "
            "mm_processor_kwargs and cache_salt",
        )
    text, token_ids, salt = (prompt.get(name) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidType(f"{field}.{name}", f"is of type {type(value).__name__}, must be text")
    if token_ids is None and text is None:
        raise InvalidRequest(field, "has neither prompt nor prompt_token_ids, must have one of them")
    tokens = text if token_ids is None else coerce.token_ids(f"{field}.prompt_token_ids", token_ids)
    assert tokens is not None, "one of them is given"
    return ReadPrompt(_with_images(field, tokens, prompt), text, salt)


def _with_images(
    field: str, tokens: str | Sequence[int], prompt: Mapping[str, Any]
) -> str | Sequence[int] | ImagePrompt:
    """Return a text or token ids with the images of a vLLM dictionary."""
    data = prompt.get("multi_modal_data") or {}
    settings = prompt.get("mm_processor_kwargs") or {}
    for name, value in (("multi_modal_data", data), ("mm_processor_kwargs", settings)):
        if not isinstance(value, Mapping):
            raise InvalidType(f"{field}.{name}", f"is of type {type(value).__name__}, must be a dict")
    if others := sorted(
        str(kind) for kind in data if kind not in ("image", "video") and data[kind] is not None
    ):
        raise InvalidRequest(
            f"{field}.multi_modal_data", f"has {', '.join(others)}, must have image and video alone"
        )
    images, videos = data.get("image"), data.get("video")
    if images is None and videos is None:
        return tokens
    images = [] if images is None else images if isinstance(images, list | tuple) else [images]
    videos = [] if videos is None else videos if _are_videos(videos) else [videos]
    for kind, values in (("image", images), ("video", videos)):
        for index, value in enumerate(values):
            if not (_is_image(value) if kind == "image" else _is_video(value)):
                must = "a PIL.Image" if kind == "image" else "a list of PIL.Image"
                raise InvalidType(
                    f"{field}.multi_modal_data.{kind}[{index}]",
                    f"is of type {type(value).__name__}, must be {must}",
                )
    return ImagePrompt(
        tokens,
        (
            *(ImageSource(image=image) for image in images),
            *(ImageSource(kind="video", frames=tuple(video)) for video in videos),
        ),
        settings,
    )


def _is_image(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL"


def _is_video(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_image, value))


def _are_videos(value: object) -> bool:
    """Return whether a value is a list of videos, not the frames of one."""
    return isinstance(value, list | tuple) and not any(map(_is_image, value))


def _is_token_ids(prompts: object) -> bool:
    return isinstance(prompts, _SEQUENCES) and len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for a call of LLM, named as in vLLM.

    The engine reads the adapter when it is first used, and keeps the least recently used ones no longer than
    `max_cpu_loras` allows.

    Args:
        lora_name: its name in errors.
        lora_int_id: at least 1. Use another number, or another name, after the adapter's files have changed.
        lora_path: its directory, in PEFT's layout.

    Raises:
        InvalidRequest: a field is not allowed.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        for field, value, most in (
            ("lora_name", self.lora_name, MAX_LORA_NAME_CHARS),
            ("lora_path", self.lora_path, MAX_LORA_PATH_CHARS),
        ):
            if not isinstance(value, str):
                raise InvalidType(field, f"is of type {type(value).__name__}, must be text")
            if not 1 <= len(value) <= most:
                raise InvalidRequest(field, f"has {len(value)} characters, must have 1 to {most}")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int):
            raise InvalidType("lora_int_id", f"is {self.lora_int_id!r}, must be a whole number")
        if self.lora_int_id < 1:
            raise InvalidRequest("lora_int_id", f"is {self.lora_int_id}, must be at least 1")

    @property
    def reference(self) -> LoraReference:
        return LoraReference(self.lora_name, self.lora_path, str(self.lora_int_id))
