"""Images of a prompt: the name, the place and the shape of each, and the tensors that its encoder reads.

A gateway turns an image into a `MediaItem`, at a range of placeholder tokens in the prompt, and `MediaTensors`. The
item travels with the prompt; the tensors travel once, under the item's digest. The digest is part of the hash of
each block that the item's range touches, so a cached prefix is found only with the same images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Bytes of the digest that names an item's tensors.
MEDIA_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image at a range of a prompt's tokens.

    Attributes:
        digest: MEDIA_DIGEST_BYTES bytes of the hash of the pixels and of the settings of the image processor.
        start: position of its first token in the prompt.
        num_tokens: tokens from `start` on. Those with the model's image token receive the rows of the encoder's
            output in order; others among them, such as ends of rows, are ordinary tokens.
        num_embeddings: rows of the encoder's output, as many as there are image tokens in the range.
        grid: frames, rows and columns of patches of a model with multi-dimensional rotary positions, as its image
            processor reports them; empty for other models.
        num_bytes: of its tensors.
    """

    digest: bytes
    start: int
    num_tokens: int
    num_embeddings: int
    grid: tuple[int, ...] = ()
    num_bytes: int = 0

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens


# Name of an encoder's argument, as the model's image processor returns it |-> the tensor of one item.
MediaTensors = Mapping[str, npt.NDArray[np.generic]]
