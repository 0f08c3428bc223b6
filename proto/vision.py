"""VisionSpec: the part of a model that sees, and the positions of a prompt with images.

An encoder turns each image into embeddings, which stand in the place of the embeddings of its image tokens. Models
with multi-dimensional rotary positions give each image token a time, a row and a column (Wang et al., Qwen2-VL,
2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .block_tables import IntArray
from .media import MediaItem

AttendsWithin = Literal["none", "all", "windows"]


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
        num_parameters: of the encoder, which every rank holds whole.
        work_per_patch: multiplications of each patch beside attention; 0 for one for each parameter.
        layer_windows: patches that a patch attends to in each layer, 0 for all of the image.
        patch_bytes: of the tensors of a patch.
        hf: the encoder's own configuration.
    """

    kind: str
    image_token_id: int
    embedding_size: int
    merge_size: int = 1
    has_grid_positions: bool = False
    attends_within: AttendsWithin = "none"
    num_deep_features: int = 0
    num_parameters: int = 0
    work_per_patch: int = 0
    layer_windows: tuple[int, ...] = ()
    patch_bytes: int = 0
    hf: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuts_images(self) -> bool:
        """Return whether a chunk may end within an image."""
        return self.attends_within == "none"

    @property
    def row_size(self) -> int:
        """Return the numbers of one row of the encoder's output: an embedding and its deep features."""
        return self.embedding_size * (1 + self.num_deep_features)

    def work(self, item: MediaItem) -> int:
        """Return the multiplications of the encoder for an image, about."""
        if not self.patch_bytes:
            return 0
        num_patches = item.num_bytes // self.patch_bytes
        num_attended = sum(min(window or num_patches, num_patches) for window in self.layer_windows)
        per_patch = self.work_per_patch or self.num_parameters
        return num_patches * (per_patch + 2 * num_attended * int(self.hf.get("hidden_size", 0)))

    def check_item(self, item: MediaItem) -> str:
        """Return what is wrong with an image for this model; empty if nothing is."""
        if not self.has_grid_positions:
            return ""
        if not item.grid:
            return "has no grid of patches, which the positions of its tokens depend on"
        frames, rows, columns = item.grid
        num_rows = frames * (rows // self.merge_size) * (columns // self.merge_size)
        if rows % self.merge_size or columns % self.merge_size or num_rows != item.num_embeddings:
            return f"has {item.num_embeddings} embeddings for a grid of {item.grid}"
        if item.num_tokens != item.num_embeddings:
            return f"has {item.num_tokens} tokens for {item.num_embeddings} embeddings"
        return ""


def rotary_positions(num_tokens: int, items: Sequence[MediaItem], merge_size: int) -> tuple[IntArray, int]:
    """Return the time, row and column of each token of a prompt, and the shift of the tokens after it.

    The tokens of text have three equal positions. An image's tokens have those of its grid, from the position after
    the text before it; the next text begins after the image's longer side.

    Returns:
        [3, num_tokens] int32, and the difference of a generated token's position and its place in the sequence.
    """
    positions = np.empty((3, num_tokens), np.int32)
    place = next_position = 0
    for item in items:
        num_text = item.start - place
        positions[:, place : item.start] = np.arange(next_position, next_position + num_text)
        next_position += num_text
        frames, rows, columns = item.grid[0], item.grid[1] // merge_size, item.grid[2] // merge_size
        grid = np.indices((frames, rows, columns), np.int32).reshape(3, -1)
        positions[:, item.start : item.end] = grid + next_position
        next_position += max(rows, columns)
        place = item.end
    positions[:, place:] = np.arange(next_position, next_position + num_tokens - place)
    return positions, next_position - place
