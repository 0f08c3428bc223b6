"""PromptImages: the images and videos of one model's prompts, from what a request has to the items of its prompt."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.config import EngineConfig
from ....proto.digests import make_root
from ....proto.errors import InvalidRequest, Overloaded
from ....proto.media import MediaItem, MediaTensors, check_media
from ....proto.vision import LongArray, MediaKind
from ..media.image_source import ImageError, ImageProcessor, ImageSource, ProcessedImage
from .chat_template import NO_IMAGES, Expansions

# Tensors of one request, and of all requests of a process that have not ended.
MAX_REQUEST_BYTES = 2 << 30
MAX_HELD_BYTES = 8 << 30

_NAMES: dict[MediaKind, str] = {"image": "an image", "video": "a video"}
_KINDS = tuple(_NAMES)

# An image or a video, and the name of its place in the request.
PlacedImage = tuple[str, ImageSource]


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A text or token ids with images and videos.

    Attributes:
        prompt: has the model's placeholder once for each of them.
        images: the images and the videos, each kind in the order of the placeholders.
        settings: settings of the model's image processor for this prompt.
    """

    prompt: str | Sequence[int]
    images: tuple[ImageSource, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def placed(self) -> list[PlacedImage]:
        """The images, with the names of their places."""
        numbers = {"image": count(), "video": count()}
        return [(f"multi_modal_data.{each.kind}[{next(numbers[each.kind])}]", each) for each in self.images]

    def with_images(self, images: Mapping[str, ImageSource]) -> ImagePrompt:
        """Return the prompt with other images, by the names of their places."""
        used = tuple(images.get(place, image) for place, image in self.placed)
        return ImagePrompt(self.prompt, used, self.settings)


@dataclass(frozen=True, slots=True)
class Images:
    """The processed images and videos of a prompt, each kind in order."""

    processed: tuple[ProcessedImage, ...] = ()

    def of_kind(self, kind: MediaKind) -> list[ProcessedImage]:
        """Return the images, or the videos."""
        return [each for each in self.processed if each.kind == kind]

    @property
    def expansions(self) -> Expansions:
        if not self.processed:
            return NO_IMAGES
        found = {kind: self.of_kind(kind) for kind in _KINDS}
        return Expansions(
            {
                kind: (own[0].placeholder, [each.expansion for each in own])
                for kind, own in found.items()
                if own
            }
        )

    @property
    def tensors(self) -> dict[bytes, MediaTensors]:
        """Digest |-> the tensors."""
        return {each.digest: each.tensors for each in self.processed}


WITHOUT_IMAGES = Images()


class _HeldBytes:
    """The bytes of tensors that live in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its thread holds it
        self._num_bytes = 0

    def hold(self, image: ProcessedImage) -> None:
        """Count an image until its tensors are gone. Raises Overloaded if there are too many."""
        with self._lock:
            if self._num_bytes + image.num_bytes > MAX_HELD_BYTES:
                raise Overloaded(
                    f"the images of running requests take {self._num_bytes:,} bytes, at most {MAX_HELD_BYTES:,}"
                )
            self._num_bytes += image.num_bytes
        for tensor in image.tensors.values():
            weakref.finalize(tensor, self._release, tensor.nbytes).atexit = False

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


_held = _HeldBytes()


class PromptImages:
    """Processes the images of one model's prompts, and finds their tokens. Threads may share one.

    Args:
        processor: None for a model that reads text alone, or whose images are not served.
    """

    def __init__(self, config: EngineConfig, processor: ImageProcessor | None) -> None:
        self._config = config
        self._vision = config.model.vision
        self._processor = processor

    @property
    def is_read(self) -> bool:
        """Return whether the model reads images."""
        return self._processor is not None

    @property
    def reads_videos(self) -> bool:
        """Return whether the model reads videos, and they can be processed here."""
        return self._processor is not None and not self._processor.video_problem

    def process(
        self, images: Sequence[PlacedImage], settings: Mapping[str, Any], tenant: str, salt: str, pool: str
    ) -> Images:
        """Return the images as the model reads them.

        Args:
            tenant, salt, pool: who shares what is kept of the images, as of prefixes.

        Raises:
            InvalidRequest: the model reads no images or no videos, there are too many, or one cannot be read.
        """
        if not images:
            return WITHOUT_IMAGES
        self._check(images)
        assert self._processor is not None, "images of a model without a processor were refused"
        root = make_root("", salt.encode(), tenant=tenant, pool=pool)
        found: list[ProcessedImage] = []
        num_tokens = num_bytes = 0
        for place, image in images:
            try:
                processed = self._processor.process(image, settings, root)
            except ImageError as error:
                raise InvalidRequest(place, str(error)) from error
            _held.hold(processed)
            found.append(processed)
            num_tokens, num_bytes = num_tokens + len(processed.token_ids), num_bytes + processed.num_bytes
            self._check_room(place, len(found), num_tokens, num_bytes)
        return Images(tuple(found))

    def _check(self, images: Sequence[PlacedImage]) -> None:
        name = self._config.model.name
        if not self.is_read:
            if self._config.model.language_model_only:
                why = "the server runs with --language-model-only"
            else:
                why = f"{name} reads text only"
            place, image = images[0]
            raise InvalidRequest(place, f"is {_NAMES[image.kind]}, and {why}")
        self.check_count(images)
        if self._shares_token and len({image.kind for _, image in images}) > 1:
            place = next(place for place, image in images if image.kind == "video")
            raise InvalidRequest(place, f"is a video beside images, and {name} reads one of both in a prompt")
        for place, image in images:
            if image.is_remote:
                raise InvalidRequest(place, "is a URL, and files are not fetched here")
            if image.kind == "video":
                self._check_video(place, image)

    def _check_video(self, place: str, video: ImageSource) -> None:
        assert self._processor is not None, "videos of a model without a processor were refused"
        if problem := self._processor.video_problem:
            raise InvalidRequest(place, f"is a video, and {problem}")
        if video.num_frames > (most := self._config.images.max_frames):
            raise InvalidRequest(
                place, f"has {video.num_frames} frames, must have at most {most} (--limit-mm-per-prompt)"
            )

    def check_count(self, images: Sequence[PlacedImage]) -> None:
        """Raise InvalidRequest if a prompt has too many images or videos."""
        for kind in _KINDS:
            places = [place for place, image in images if image.kind == kind]
            if len(places) > (most := self._config.images.max_count(kind)):
                allowed = f"at most {most} of a request are allowed (--limit-mm-per-prompt)"
                raise InvalidRequest(places[most], f"is one of {len(places)} {kind}s, {allowed}")

    def _check_room(self, place: str, num_images: int, num_tokens: int, num_bytes: int) -> None:
        room = self._config.max_servable_tokens
        if num_tokens >= room:
            problem = f"makes {num_tokens} tokens of {num_images} images, and the context has {room}"
            raise InvalidRequest(place, f"{problem}; send fewer or smaller ones")
        if num_bytes > MAX_REQUEST_BYTES:
            problem = f"makes {num_bytes:,} bytes of {num_images} images, at most {MAX_REQUEST_BYTES:,}"
            raise InvalidRequest(place, f"{problem}; send fewer or smaller ones")

    def expand(self, token_ids: IntArray, images: Images, encode: Callable[[str], Sequence[int]]) -> IntArray:
        """Return token ids with the tokens of the images in the places of their placeholders.

        Those that have the images' tokens already stay as they are.

        Args:
            encode: returns the tokens of a placeholder.
        """
        found = list[tuple[int, int, ProcessedImage]]()  # start and end of each place
        for kind in _KINDS:
            own = images.of_kind(kind)
            if not own or len(self._places(token_ids, kind)) == _num_embeddings(own):
                continue
            placeholder = encode(own[0].placeholder)
            starts = _find(token_ids, placeholder)
            if len(starts) != len(own):
                raise self._mismatch(kind, len(starts), own)
            found += [
                (start, start + len(placeholder), each) for start, each in zip(starts, own, strict=True)
            ]
        pieces, end = [], 0
        for start, next_end, image in sorted(found, key=lambda each: each[0]):
            pieces += [token_ids[end:start], np.asarray(image.token_ids, np.int32)]
            end = next_end
        return np.concatenate([*pieces, token_ids[end:]]).astype(np.int32)

    def items(self, token_ids: IntArray, images: Images) -> tuple[MediaItem, ...]:
        """Return the places of the images in the whole prompt.

        Raises:
            InvalidRequest: the prompt has more or fewer image tokens than the images.
        """
        found = [
            item
            for kind in self._token_kinds(images)
            for item in self._items_of_kind(kind, token_ids, images.of_kind(kind))
        ]
        found.sort(key=lambda item: item.start)
        try:
            check_media(found, len(token_ids))
        except ValueError as error:  # token ids of the client have an image within a video
            raise InvalidRequest("prompt", str(error)) from error
        return tuple(found)

    @property
    def _shares_token(self) -> bool:
        return self._vision is not None and self._vision.shares_token

    def _token_kinds(self, images: Images) -> Sequence[MediaKind]:
        """Return the kinds to look for by their tokens; one of two that share a token."""
        if not self._shares_token:
            return _KINDS
        return ("video",) if images.of_kind("video") else ("image",)

    def _items_of_kind(
        self, kind: MediaKind, token_ids: IntArray, images: Sequence[ProcessedImage]
    ) -> Iterator[MediaItem]:
        places, place = self._places(token_ids, kind), 0
        if len(places) != _num_embeddings(images):
            raise self._mismatch(kind, len(places), images)
        for image in images:
            first, last = places[place], places[place + image.num_embeddings - 1]
            place += image.num_embeddings
            assert self._vision is not None, "images of a model without an encoder were refused"
            yield MediaItem(
                image.digest,
                int(first),
                int(last - first) + 1,
                image.num_embeddings,
                image.grid,
                image.num_bytes,
                self._vision.time_step(image.seconds_per_frame),
            )

    def _places(self, token_ids: IntArray, kind: MediaKind) -> LongArray:
        token_id = None if self._vision is None else self._vision.token_id(kind)
        return np.flatnonzero(token_ids == token_id) if token_id is not None else np.zeros(0, np.int64)

    def _mismatch(self, kind: MediaKind, num_places: int, images: Sequence[ProcessedImage]) -> InvalidRequest:
        token = f"the token {0 if self._vision is None else self._vision.token_id(kind)}"
        text = images[0].placeholder if images else token
        return InvalidRequest(
            "prompt",
            f"has {num_places} places of {kind}s ({text}) for {len(images)} {kind}s "
            f"with {_num_embeddings(images)} tokens; the text must not have such places itself",
        )


def _num_embeddings(images: Sequence[ProcessedImage]) -> int:
    return sum(image.num_embeddings for image in images)


def _find(token_ids: IntArray, wanted: Sequence[int]) -> list[int]:
    """Return the starts of a run of ids among others, apart from each other."""
    starts, size = [], len(wanted)
    place = 0
    for start in np.flatnonzero(token_ids == wanted[0]).tolist() if size else ():
        if start >= place and token_ids[start : start + size].tolist() == list(wanted):
            starts.append(start)
            place = start + size
    return starts
