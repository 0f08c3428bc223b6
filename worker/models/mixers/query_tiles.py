"""Tile: queries of a step whose attention is computed together, by ops that take dense keys; and ends of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...attention import AttentionInputs
from ...memory.host_to_device import to_device_once

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


def whole_ends(inputs: AttentionInputs, num_tokens: int, block_len: int) -> Tensor:
    """Return the tokens that make a block of their sequence whole; all tokens in recorded steps, of fixed shapes."""
    known, device = inputs.known_lens, inputs.seq_lens.device
    if known is None or inputs.chunks is None:
        return torch.arange(num_tokens, device=device)
    chunks = [np.arange(length - count, length) + 1 for count, length in zip(*inputs.chunks, strict=True)]
    lens = np.concatenate((np.array(known[: inputs.num_decodes], np.int64), *chunks))
    return to_device_once(np.flatnonzero(lens % block_len == 0), device)
