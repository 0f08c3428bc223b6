"""WeightSlice: the rows or columns of a stored matrix that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]  # start and length


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows or columns of one stored matrix. A linear layer's matrix is the concatenation of its slices' rows.

    Attributes:
        name: of the stored layer, without ``.weight``.
        shape: [N, K] of the whole matrix, outputs and inputs.
        dim: 0 for a slice of the outputs, 1 for a slice of the inputs.
        start, length: of the slice, along `dim`.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    start: int
    length: int

    @property
    def outputs(self) -> Range:
        return self._range(0)

    @property
    def inputs(self) -> Range:
        return self._range(1)

    def _range(self, dim: int) -> Range:
        return (self.start, self.length) if dim == self.dim else (0, self.shape[dim])
