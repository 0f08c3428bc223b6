"""Images and videos of a prompt: the name, the place and the shape of each, and the tensors that its encoder reads.

A gateway turns an image into a `MediaItem`, at a range of placeholder tokens in the prompt, and `MediaTensors`. The
item travels with the prompt; the tensors travel once, under the item's digest. The digest is part of the hash of
each block that the item's range touches, so a cached prefix is found only with the same images.

A video is an image whose grid has several frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from .later_fields import sent_if_set

# Bytes of the digest that names an item's tensors.
MEDIA_DIGEST_BYTES = 16
# Items of a prompt, and bytes of an item's tensors: 16 megapixels are 384 MB as the patches of Qwen2.5-VL.
MAX_MEDIA_ITEMS = 1024
MAX_MEDIA_BYTES = 1 << 29
# Tensors of an item, dimensions of a tensor, and characters of a tensor's name.
MAX_MEDIA_TENSORS = 8
_MAX_DIMENSIONS = 6
_MAX_NAME_CHARS = 64
# Positions in time from a frame to the next one: a month of seconds.
_MAX_TIME_STEP = 1 << 22
# Types of the tensors that image processors return, in the order of this processor's bytes.
MEDIA_DTYPES = ("<f4", "<f2", "<i8", "<i4", "|u1", "|b1")
# Bytes of a MediaUpload. A scheduler reads one in 0.2 ms, between two steps.
MEDIA_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or a video at a range of a prompt's tokens.

    Attributes:
        digest: MEDIA_DIGEST_BYTES bytes of the hash of the pixels, of the settings of the image processor, and of
            those who share prefixes (`digests.make_root`): nothing of one tenant's image is found by another.
        start: position of its first token in the prompt.
        num_tokens: tokens from `start` on. Those with the model's image or video token receive the rows of the
            encoder's output in order; others among them, such as ends of rows or times of frames, are ordinary ones.
        num_embeddings: rows of the encoder's output, as many as there are image tokens in the range.
        grid: frames, rows and columns of patches of a model with multi-dimensional rotary positions, as its image
            processor reports them; empty for other models.
        num_bytes: of its tensors.
        time_step: positions in time from a frame of the grid to the next one, as a number of float32.
    """

    digest: bytes
    start: int
    num_tokens: int
    num_embeddings: int
    grid: tuple[int, ...] = ()
    num_bytes: int = 0
    time_step: float = sent_if_set(1.0)

    def __post_init__(self) -> None:
        if type(self.digest) is not bytes or len(self.digest) != MEDIA_DIGEST_BYTES:
            raise ValueError(f"an item's digest has {len(self.digest)} bytes, must have {MEDIA_DIGEST_BYTES}")
        if self.start < 0 or self.num_tokens < 1 or not 1 <= self.num_embeddings <= self.num_tokens:
            raise ValueError(
                f"an item has {self.num_embeddings} embeddings for {self.num_tokens} tokens from {self.start}; "
                "there must be at least one, and no more than tokens"
            )
        if len(self.grid) not in (0, 3) or any(length < 1 for length in self.grid):
            raise ValueError(f"an item's grid is {self.grid}, must be empty or three positive lengths")
        if not 0 <= self.num_bytes <= MAX_MEDIA_BYTES:
            raise ValueError(f"an item has {self.num_bytes} bytes, must have at most {MAX_MEDIA_BYTES}")
        if not 0 <= self.time_step <= _MAX_TIME_STEP:
            raise ValueError(f"an item has a time step of {self.time_step}, must have 0 to {_MAX_TIME_STEP}")

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens

    @property
    def last_time(self) -> int:
        """Position in time of its last frame, at most."""
        return self.start + math.ceil(self.time_step * (math.prod(self.grid[:1]) - 1))


# Name of an encoder's argument, as the model's image processor returns it |-> the tensor of one item.
MediaTensors = Mapping[str, npt.NDArray[np.generic]]


def check_media(items: Sequence[MediaItem], num_tokens: int) -> None:
    """Raise ValueError unless the items are in order, apart from each other and within a prompt of `num_tokens`."""
    if len(items) > MAX_MEDIA_ITEMS:
        raise ValueError(f"a prompt has {len(items)} images, must have at most {MAX_MEDIA_ITEMS}")
    end = 0
    for item in items:
        if not end <= item.start < item.end <= num_tokens:
            raise ValueError(
                f"an image is at tokens {item.start} to {item.end}, must be between {end} and {num_tokens}"
            )
        end = item.end


@dataclass(frozen=True)
class TensorLayout:
    """Name, type and shape of one tensor of an item.

    Attributes:
        dtype: one of MEDIA_DTYPES.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _MAX_NAME_CHARS:
            raise ValueError(f"a tensor's name is {self.name!r}, must have 1 to {_MAX_NAME_CHARS} characters")
        if self.dtype not in MEDIA_DTYPES:
            raise ValueError(
                f"tensor {self.name} has type {self.dtype!r}, must be of {', '.join(MEDIA_DTYPES)}"
            )
        is_shape = all(type(length) is int and length >= 0 for length in self.shape)
        if not is_shape or len(self.shape) > _MAX_DIMENSIONS or self.num_bytes > MAX_MEDIA_BYTES:
            raise ValueError(
                f"tensor {self.name} has shape {self.shape}, must have at most {_MAX_DIMENSIONS} dimensions "
                f"and {MAX_MEDIA_BYTES} bytes"
            )

    @cached_property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def layout_of(tensors: MediaTensors) -> tuple[TensorLayout, ...]:
    """Return the layout of an item's tensors, in their order. Raises ValueError if they are not allowed."""
    layout = tuple(TensorLayout(name, each.dtype.str, each.shape) for name, each in tensors.items())
    num_layout_bytes(layout)
    return layout


def num_layout_bytes(layout: Sequence[TensorLayout]) -> int:
    """Return the bytes of tensors. Raises ValueError if they are too many, or two have one name."""
    num_bytes = sum(each.num_bytes for each in layout)
    names = {each.name for each in layout}
    if not 0 < len(layout) <= MAX_MEDIA_TENSORS or len(names) < len(layout) or num_bytes > MAX_MEDIA_BYTES:
        raise ValueError(
            f"an item has {len(layout)} tensors of {len(names)} names and {num_bytes} bytes, must have at most "
            f"{MAX_MEDIA_TENSORS} of different names and {MAX_MEDIA_BYTES} bytes"
        )
    return num_bytes


def media_pieces(tensors: MediaTensors, piece_bytes: int = MEDIA_PIECE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of an item's tensors, one after the other, as (offset, piece)."""
    offset = 0
    for tensor in tensors.values():
        raw = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        for start in range(0, len(raw), piece_bytes):
            yield offset + start, raw[start : start + piece_bytes].tobytes()
        offset += len(raw)


class MediaAssembly:
    """Memory for an item's tensors, which arrive in pieces.

    Args:
        layout: the tensors, whose bytes follow each other.
    """

    def __init__(self, layout: tuple[TensorLayout, ...]) -> None:
        self.layout = layout
        self.num_bytes = num_layout_bytes(layout)
        self._bytes = np.empty(self.num_bytes, np.uint8)
        self._end = 0

    @classmethod
    def of(cls, layout: tuple[TensorLayout, ...], data: npt.NDArray[np.uint8]) -> Self:
        """Return the tensors whose bytes are there already, [n] uint8, without a copy. Raises ValueError."""
        whole = cls.__new__(cls)
        whole.layout, whole.num_bytes, whole._bytes = layout, num_layout_bytes(layout), data
        whole._end = len(data)
        if whole._end != whole.num_bytes:
            raise ValueError(f"tensors of {whole.num_bytes} bytes have {whole._end}")
        return whole

    @property
    def is_complete(self) -> bool:
        """Return whether every piece has arrived."""
        return self._end == self.num_bytes

    def add(self, offset: int, piece: bytes) -> None:
        """Take a piece. Raises ValueError if it is outside the tensors.

        One that is there already is ignored, and so is one after a gap: it is of an earlier upload that was given
        up, and the one that follows begins at the beginning.
        """
        end = offset + len(piece)
        if offset < 0 or end > self.num_bytes:
            raise ValueError(f"a piece of an image is at bytes {offset} to {end} of {self.num_bytes}")
        if offset <= self._end < end:
            self._bytes[offset:end] = np.frombuffer(piece, np.uint8)
            self._end = end

    @property
    def data(self) -> memoryview:
        """Return the bytes of all tensors, which do not change any more."""
        assert self.is_complete, "the tensors of an image are read before all of them are there"
        return self._bytes.data

    def tensors(self) -> MediaTensors:
        """Return name |-> the tensor, a view of the memory."""
        assert self.is_complete, "the tensors of an image are read before all of them are there"
        found, start = {}, 0
        for each in self.layout:
            raw = self._bytes[start : start + each.num_bytes]
            found[each.name] = raw.view(each.dtype).reshape(each.shape)
            start += each.num_bytes
        return found
