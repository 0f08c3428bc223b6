"""WeightSlice: the rows or columns of a stored matrix that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]  # start and length


@dataclass(frozen=True, slots=True)
class Interleaving:
    """Order of stored rows in which the two halves of a run of rows alternate.

    Attributes:
        run_len: rows per run.
        num_alternating: of each run, the first rows that alternate; they are reordered to two halves.
    """

    run_len: int
    num_alternating: int

    def order(self, num_rows: int) -> list[int]:
        """Return the stored index of each row, the halves one after the other."""
        run = [
            *range(0, self.num_alternating, 2),
            *range(1, self.num_alternating, 2),
            *range(self.num_alternating, self.run_len),
        ]
        return [start + row for start in range(0, num_rows, self.run_len) for row in run]

    def reorder(self, stored: Tensor, dim: int = 0) -> Tensor:
        """Return a copy of stored rows, in dimension `dim`, with the halves one after the other."""
        return stored.index_select(dim, torch.tensor(self.order(stored.shape[dim]), device=stored.device))


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows or columns of one stored matrix. A linear layer's matrix is the concatenation of its slices' rows.

    Attributes:
        name: of the stored layer, without ``.weight``.
        shape: [N, K] of the whole matrix, outputs and inputs.
        dim: 0 for a slice of the outputs, 1 for a slice of the inputs.
        start, length: of the slice, along `dim`.
        interleaving: of the slice's rows; None if they are in order.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    start: int
    length: int
    interleaving: Interleaving | None = None

    @property
    def outputs(self) -> Range:
        return self._range(0)

    @property
    def inputs(self) -> Range:
        return self._range(1)

    def _range(self, dim: int) -> Range:
        return (self.start, self.length) if dim == self.dim else (0, self.shape[dim])
