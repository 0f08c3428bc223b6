"""WeightSlice: the rows or columns of a stored matrix that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

Range = tuple[int, int]  # start and length


class RowOrder(Protocol):
    """Order of a slice's rows that differs from the stored one."""

    def order(self, num_rows: int) -> list[int]:
        """Return the stored index of each row."""
        ...

    def reorder(self, stored: Tensor, dim: int = 0) -> Tensor:
        """Return a copy of stored rows, in dimension `dim`, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Order of stored rows whose runs consist of several parts; it puts the same part of all runs together.

    Attributes:
        sizes: rows of each part of a run.
        places: the parts in their new order.
    """

    sizes: tuple[int, ...]
    places: tuple[int, ...]

    def order(self, num_rows: int) -> list[int]:
        """Return the stored index of each row."""
        starts, run_len = [0, *accumulate(self.sizes)], sum(self.sizes)
        return [
            run + row
            for place in self.places
            for run in range(0, num_rows, run_len)
            for row in range(starts[place], starts[place + 1])
        ]

    def reorder(self, stored: Tensor, dim: int = 0) -> Tensor:
        """Return a copy of stored rows, in dimension `dim`, in order."""
        return stored.index_select(dim, torch.tensor(self.order(stored.shape[dim]), device=stored.device))


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
    interleaving: RowOrder | None = None

    @property
    def outputs(self) -> Range:
        return self._range(0)

    @property
    def inputs(self) -> Range:
        return self._range(1)

    def _range(self, dim: int) -> Range:
        return (self.start, self.length) if dim == self.dim else (0, self.shape[dim])
