"""PoolingParams: the settings of a pooled request. Pooled: vectors as messages carry them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .block_tables import IntArray
from .codec import FloatArray
from .errors import InvalidRequest

# Far above the width of any model.
MAX_DIMENSIONS = 1 << 20
# Of an invalid value in an error.
_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Settings of a pooled request; the names are vLLM's.

    Args:
        dimensions: leading dimensions of an embedding to return, as models trained with Matryoshka losses allow
            (Kusupati et al., 2022); None for all.
        use_activation: normalize an embedding, or apply the activation of a classifier (sigmoid or softmax), if the
            model has one.
        truncate_prompt_tokens: keep this many of the first tokens of a longer prompt, the special tokens at its end
            included; -1 for the model's context. None refuses longer prompts.

    Raises:
        InvalidRequest: a value has the wrong type or is out of its range.
    """

    dimensions: int | None = None
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.use_activation, bool):
            raise InvalidRequest(
                "pooling.use_activation", f"is {self.use_activation!r}, must be true or false"
            )
        _check_count("pooling.dimensions", self.dimensions, least=1)
        _check_count("pooling.truncate_prompt_tokens", self.truncate_prompt_tokens, least=-1)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("pooling.truncate_prompt_tokens", "is 0, must be -1 or at least 1")


@dataclass(frozen=True, slots=True)
class Pooled:
    """Pooled vectors of several sequences.

    Attributes:
        owners: [n] int32, the owner of each vector: a row in a StepResult, ascending; a handle in a TokenBatch.
        lens: [n] int32, numbers of each vector.
        values: [sum of lens] float32, one vector after the other.
    """

    owners: IntArray
    lens: IntArray
    values: FloatArray

    def __post_init__(self) -> None:
        if self.owners.size != self.lens.size or self.lens.sum() != self.values.size:
            raise ValueError(f"{self.values.size} values for vectors of {self.lens.tolist()} numbers")

    def __iter__(self) -> Iterator[tuple[int, FloatArray]]:
        """Yield each owner with its vector."""
        parts = np.split(self.values, np.cumsum(self.lens)[:-1])
        return iter(zip(self.owners.tolist(), parts, strict=True))

    def select(self, mask: npt.NDArray[np.bool_], owners: IntArray) -> Pooled | None:
        """Return the vectors under `mask` with `owners` as their owners; None if there are none."""
        if not mask.any():
            return None
        return Pooled(owners, self.lens[mask], self.values[np.repeat(mask, self.lens)])


def _check_count(field: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_DIMENSIONS:
        shown = repr(value)[:_MAX_SHOWN_CHARS]
        raise InvalidRequest(field, f"is {shown}, must be from {least} to {MAX_DIMENSIONS}")
