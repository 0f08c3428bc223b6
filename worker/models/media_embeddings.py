"""MediaEmbeddings: the encoder outputs of the image tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MediaEmbeddings:
    """Embeddings of image tokens.

    Attributes:
        index: [N] int64, the image tokens among the T of the step.
        rows: [N, E], which stand in the place of their embeddings.
        deep: [N, E] each, which are added to the outputs of the first layers.
    """

    index: Tensor
    rows: Tensor
    deep: Sequence[Tensor] = ()
