"""ImageSource: an image or a video of a request; ProcessedImage: of a prompt; ImageProcessor between."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Protocol

from ....proto.media import MediaTensors
from ....proto.vision import MediaKind

DETAILS = ("auto", "low", "high")
# Begins of the URLs of videos, before frames in base64 with commas between them, as in vLLM.
FRAME_HEADERS = ("data:video/jpeg;base64,", "data:video/png;base64,")
# Of a data URL, whose largest image is that of the largest body.
_MAX_HEADER_CHARS = 256


class ImageError(Exception):
    """An image cannot be read; `RequestChecker` adds its place in the request."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request: a file, a URL, or an image of PIL; or a video, the frames of which are such images.

    Attributes:
        data: content of a PNG, JPEG, WebP or GIF file; empty for an image that is elsewhere.
        url: the address of a file, with the scheme ``data``, ``https`` or ``http``; `data` comes first.
        image: a PIL.Image, in a process that trusts it.
        detail: ``low`` shrinks the image to 512 by 512 pixels first; ``auto`` and ``high`` do not.
        kind: whether it is an image or a video.
        frames: of a video, each the content of a file or a PIL.Image; none if the URL has them.
    """

    data: bytes = field(default=b"", repr=False)
    url: str = field(default="", repr=False)
    image: Any = field(default=None, repr=False)
    detail: str = "auto"
    kind: MediaKind = "image"
    frames: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def num_frames(self) -> int:
        """Frames of a video, as its text shows."""
        return len(self.frames) or self.url.count(",")

    def frame_sources(self) -> list[ImageSource]:
        """Return the frames of a video as images."""
        if not self.frames:
            header, *texts = self.url.split(",")
            return [ImageSource(url=f"{header},{text}") for text in texts]
        return [
            ImageSource(data=each) if isinstance(each, bytes) else ImageSource(image=each)
            for each in self.frames
        ]

    @property
    def is_remote(self) -> bool:
        """Return whether the file has to be fetched first."""
        is_here = self.data or self.image is not None or self.kind == "video"
        return not is_here and self.url[:5].lower() != "data:"

    @property
    def name(self) -> str:
        """Digest of the file or the URL, for the identity of a call."""
        content = self.data or self.url.encode(errors="surrogatepass")
        if self.frames:
            content = "".join(each.name for each in self.frame_sources()).encode()
        content = content or repr(self.image).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest() + self.detail

    def file(self) -> bytes:
        """Return the content of the file, of a data URL its decoded content, of an image of PIL as PNG.

        Raises:
            ImageError: the URL has no base64.
        """
        if self.data:
            return self.data
        if self.image is not None:
            buffer = BytesIO()
            self.image.save(buffer, "PNG")
            return buffer.getvalue()
        header, comma, text = self.url.partition(",")
        if not comma or len(header) > _MAX_HEADER_CHARS or not header.lower().endswith(";base64"):
            raise ImageError("has a data URL of another form, must be data:image/png;base64, and the file")
        return from_base64(text)


# Characters of base64 that are decoded by one call, in a millisecond; a multiple of four.
_PART_LEN = 256 << 10


def from_base64(text: str) -> bytes:
    """Return the bytes that base64 stands for. Raises ImageError."""
    try:
        # One call keeps the interpreter: 70 ms for 15 MB (AMD EPYC). The parts of a text stand for themselves.
        padding = text.find("=")
        if 0 <= padding < len(text) - 2:
            raise binascii.Error("Excess data after padding")
        parts = (text[start : start + _PART_LEN] for start in range(0, len(text), _PART_LEN))
        data = b"".join(binascii.a2b_base64(part, strict_mode=True) for part in parts)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"has wrong base64: {error}") from error
    if not data:
        raise ImageError("is empty")
    return data


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image or a video as the model reads it.

    Attributes:
        digest: name of the tensors; see MediaItem.
        placeholder: text of the place of an image in a prompt, of this family of models.
        expansion: text that replaces the placeholder.
        token_ids: tokens of the expansion.
        num_embeddings: the number of them that receive an embedding.
        grid: see MediaItem.
        tensors: see MediaTensors.
        kind: whether it is an image or a video.
        seconds_per_frame: time from a frame of the grid to the next one, as a number of float32; 0 of an image, and
            for models that read times as text.
    """

    digest: bytes
    placeholder: str
    expansion: str
    token_ids: tuple[int, ...]
    num_embeddings: int
    grid: tuple[int, ...]
    tensors: MediaTensors
    kind: MediaKind = "image"
    seconds_per_frame: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ImageProcessor(Protocol):
    """Processes images and videos as a model's own processor of transformers does. Threads may share one."""

    @property
    def video_problem(self) -> str:
        """Why videos cannot be processed; empty if they can."""
        ...

    def process(self, source: ImageSource, settings: Mapping[str, Any], root: bytes) -> ProcessedImage:
        """Return the image as the model reads it.

        Args:
            settings: settings of the image processor that replace the model's own.
            root: names those who share what is kept of the image; part of its digest.

        Raises:
            ImageError: the image cannot be read.
        """
        ...
