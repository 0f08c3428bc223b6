"""Tile: queries of a step whose attention is computed together, by ops that take dense keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...attention import AttentionInputs

# Queries of a chunk at a time.
_TILE_LEN = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of a step that attend together: one of each of G sequences, or T of one sequence.

    Attributes:
        tokens: of the step, G T of them.
        sequences: [G] int64.
        positions: [G, T] int64, of the queries.
        length: tokens of the longest sequence up to its last query, or more in recorded steps.
    """

    tokens: slice
    sequences: Tensor
    positions: Tensor
    length: int


def query_tiles(inputs: AttentionInputs, block_size: int) -> Iterator[Tile]:
    """Yield the queries of a step: those that decode, then those of each chunk, some at a time.

    Recorded steps have no chunks.
    """
    lens, split = inputs.known_lens, inputs.num_decodes
    device = inputs.seq_lens.device
    if split:
        positions = inputs.seq_lens[:split, None].long() - 1
        length = inputs.block_tables.shape[1] * block_size if lens is None else max(lens[:split])
        yield Tile(slice(0, split), torch.arange(split, device=device), positions, length)
    if inputs.chunks is None:
        return
    starts = list(accumulate(inputs.chunks.query_lens, initial=0))
    for index, length in enumerate(inputs.chunks.seq_lens):
        first, end = starts[index], starts[index + 1]
        sequence = torch.arange(split + index, split + index + 1, device=device)
        for start in range(first, end, _TILE_LEN):
            stop = min(start + _TILE_LEN, end)
            last = length - (end - stop)  # tokens of the sequence up to the last query
            positions = torch.arange(last - (stop - start), last, device=device)[None]
            yield Tile(slice(split + start, split + stop), sequence, positions, last)
