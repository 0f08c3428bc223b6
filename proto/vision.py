"""VisionSpec: the part of a model that sees, and the positions of a prompt with images.

An encoder turns each image or video into embeddings, which stand in the place of the embeddings of its tokens. Models
with multi-dimensional rotary positions give each image token a time, a row and a column (Wang et al., Qwen2-VL,
2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .block_tables import IntArray
from .media import MediaItem

AttendsWithin = Literal["none", "all", "windows"]
MediaKind = Literal["image", "video"]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncoderLayers:
    """Equal layers of an encoder, of which each rank has some heads and inner elements.

    Attributes:
        size, inner: elements of the hidden states and inside the feed-forward network.
        num_kv_heads: 0 for as many as there are heads.
        head_dim: 0 for `size` divided by the heads.
        num_inward: matrices into the feed-forward network: one, or a gate and another one.
        num_others: numbers of a layer that each rank holds besides, in norms and factors.
        is_divisible: the ranks may share a layer; otherwise each of them holds it whole.
    """

    count: int
    size: int
    inner: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    num_inward: int = 1
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    num_others: int = 0
    is_divisible: bool = True

    def num_parameters(self, num_ranks: int = 1) -> int:
        """Return the parameters that each of the ranks holds."""
        num_kv_heads, head_dim = (
            self.num_kv_heads or self.num_heads,
            self.head_dim or self.size // self.num_heads,
        )
        heads, kv_heads = self.num_heads * head_dim, num_kv_heads * head_dim
        divided = (heads + 2 * kv_heads) * (self.size + self.qkv_bias) + heads * self.size
        divided += self.inner * (self.num_inward * (self.size + self.mlp_bias) + self.size)
        whole = (self.output_bias + self.mlp_bias) * self.size + self.num_others
        sizes = self.num_heads, num_kv_heads, self.inner
        if self.is_divisible and all(each % num_ranks == 0 for each in sizes):
            divided //= num_ranks
        return self.count * (divided + whole)


@dataclass(frozen=True)
class VisionSpec:
    """Encoder of a model that reads images.

    Attributes:
        kind: name of the encoder in worker/models/vision.
        image_token_id: token in whose place an embedding stands.
        embedding_size: numbers of an embedding: the hidden size of the text model.
        merge_size: rows and columns of patches that one embedding covers.
        has_grid_positions: image tokens have multi-dimensional rotary positions, by MediaItem.grid.
        attends_within: layers in which the tokens of an image attend to each other in both directions.
        num_deep_features: further embeddings of each image token, which the first layers add to their outputs.
        layers: of its parameters, those of layers that the ranks may share.
        num_parameters: of the encoder.
        work_per_patch: multiplications of each patch beside attention; 0 for one for each parameter.
        layer_windows: patches that a patch attends to in each layer, 0 for all of the image.
        patch_bytes: of the tensors of a patch.
        hf: the encoder's own configuration.
        video_token_id: as image_token_id, of a frame of a video; None for a model that reads no videos. If it is that
            of images, a prompt has images or videos.
        tokens_per_second: positions in time of a second of a video; 0 for a position for each frame of the grid.
    """

    kind: str
    image_token_id: int
    embedding_size: int
    merge_size: int = 1
    has_grid_positions: bool = False
    attends_within: AttendsWithin = "none"
    num_deep_features: int = 0
    layers: tuple[EncoderLayers, ...] = ()
    num_parameters: int = 0
    work_per_patch: int = 0
    layer_windows: tuple[int, ...] = ()
    patch_bytes: int = 0
    hf: Mapping[str, Any] = field(default_factory=dict)
    video_token_id: int | None = None
    tokens_per_second: float = 0.0

    @property
    def cuts_images(self) -> bool:
        """Return whether a chunk may end within an image."""
        return self.attends_within == "none"

    @property
    def row_size(self) -> int:
        """Return the numbers of one row of the encoder's output: an embedding and its deep features."""
        return self.embedding_size * (1 + self.num_deep_features)

    def rank_parameters(self, num_ranks: int) -> int:
        """Return the parameters that each rank holds of an encoder whose layers so many ranks share."""
        shared = sum(own.num_parameters() - own.num_parameters(num_ranks) for own in self.layers)
        return self.num_parameters - shared

    @property
    def shares_token(self) -> bool:
        """Return whether the tokens of images and videos are the same."""
        return self.video_token_id == self.image_token_id

    def token_id(self, kind: MediaKind) -> int | None:
        """Return the token in whose place an embedding of an image or a video stands; None if none is read."""
        return self.video_token_id if kind == "video" else self.image_token_id

    def places(self, token_ids: IntArray) -> LongArray:
        """Return the places of the tokens that receive embeddings."""
        found = token_ids == self.image_token_id
        if self.video_token_id is not None:
            found |= token_ids == self.video_token_id
        return np.flatnonzero(found)

    def time_step(self, seconds: float) -> float:
        """Return MediaItem.time_step of frames that are `seconds` apart, a number of float32; 0 for an image."""
        return float(np.float32(self.tokens_per_second) * np.float32(seconds)) if seconds else 1.0

    def work(self, item: MediaItem) -> int:
        """Return the multiplications of the encoder for an image, about; the frames of a video are encoded alone."""
        if not self.patch_bytes:
            return 0
        num_patches = item.num_bytes // self.patch_bytes
        frame_len = num_patches // math.prod(item.grid[:1])
        num_attended = sum(min(window or frame_len, frame_len) for window in self.layer_windows)
        per_patch = self.work_per_patch or self.num_parameters
        return num_patches * (per_patch + 2 * num_attended * int(self.hf.get("hidden_size", 0)))

    def check_item(self, item: MediaItem, token_ids: IntArray) -> str:
        """Return what is wrong with an image for this model; empty if nothing is.

        Args:
            token_ids: of the item.
        """
        places = self.places(token_ids)
        if len(places) != item.num_embeddings:
            return f"has {item.num_embeddings} embeddings for {len(places)} image tokens of the prompt"
        if not self.has_grid_positions:
            return ""
        if not item.grid:
            return "has no grid of patches, which the positions of its tokens depend on"
        frames, rows, columns = item.grid
        frame_len = (rows // self.merge_size) * (columns // self.merge_size)
        if rows % self.merge_size or columns % self.merge_size or frames * frame_len != item.num_embeddings:
            return f"has {item.num_embeddings} embeddings for a grid of {item.grid}"
        if any(len(run) % frame_len for run in runs(places)):
            return f"has other tokens within the {frame_len} of a frame"
        return ""


def runs(places: LongArray) -> list[LongArray]:
    """Return the runs of places that follow each other, of at least one place."""
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)


def rotary_positions(
    num_tokens: int, items: Sequence[MediaItem], places: Sequence[LongArray], merge_size: int
) -> tuple[IntArray, int]:
    """Return the time, row and column of each token of a prompt, and the shift of the tokens after it.

    The tokens of text have three equal positions. An image's tokens have those of its grid, from the position after
    the text before it; the next text begins after the image's longer side. So do the frames of a video, each like an
    image if there is text between them.

    Args:
        places: of each item, the places of its image tokens.

    Returns:
        [3, num_tokens] int32, and the difference of a generated token's position and its place in the sequence.
    """
    positions = np.empty((3, num_tokens), np.int32)
    place = next_position = 0
    for item, own in zip(items, places, strict=True):
        rows, columns = item.grid[1] // merge_size, item.grid[2] // merge_size
        for run in runs(own):
            start, end = int(run[0]), int(run[-1]) + 1
            positions[:, place:start] = np.arange(next_position, next_position + start - place)
            next_position += start - place
            grid = np.indices((len(run) // (rows * columns), rows, columns), np.int32).reshape(3, -1)
            # As transformers, of which the products are of float32, cut to whole numbers.
            grid[0] = grid[0].astype(np.float32) * np.float32(item.time_step)
            positions[:, start:end] = grid + next_position
            next_position += max(rows, columns)
            place = end
    positions[:, place:] = np.arange(next_position, next_position + num_tokens - place)
    return positions, next_position - place
