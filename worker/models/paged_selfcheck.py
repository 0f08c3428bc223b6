"""A model that was not written for paged caches has to prove, before it serves, that it can run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...proto.errors import ConfigError, QuireError, first_line
from ..attention import AttentionInputs, LayerCache

Forward = Callable[[Tensor, Tensor, list[LayerCache], AttentionInputs], Tensor]

BLOCK_SIZE = 16
# Tokens of the two sequences.
LENS = 7, 5
# How far the same hidden states may be apart, relative to their length: rounding, and no more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens of a sequence that are computed in one step; a sequence has the block of its number."""

    sequence: int
    start: int
    end: int


def run_paged_selfcheck(
    forward: Forward,
    num_layers: int,
    head_shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks that tokens see each other through attention only: two sequences that are computed in chunks, beside
    each other, have the hidden states that each has alone.

    Args:
        forward: of the model.
        head_shape: KV heads of this rank, and head_dim.

    Raises:
        ConfigError: they have not, or the model does not run; says why.
    """

    def run(*steps: Sequence[_Chunk]) -> Tensor:
        shape = len(LENS), 2, head_shape[0], BLOCK_SIZE, head_shape[1]
        caches = [LayerCache(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(num_layers)]
        pieces: dict[tuple[int, int], Tensor] = {}
        for chunks in steps:
            hidden = _run_step(forward, chunks, caches, device)
            lengths = [chunk.end - chunk.start for chunk in chunks]
            for chunk, piece in zip(chunks, hidden.split_with_sizes(lengths), strict=True):
                pieces[chunk.sequence, chunk.start] = piece.float()
        return torch.cat([pieces[key] for key in sorted(pieces)])

    long, short = LENS
    try:
        alone = run([_Chunk(0, 0, long)], [_Chunk(1, 0, short)])
        mixed = run(
            [_Chunk(0, 0, long - 1), _Chunk(1, 0, 1)], [_Chunk(0, long - 1, long), _Chunk(1, 1, short)]
        )
    except (QuireError, ConnectionError):
        raise
    except Exception as error:  # whatever a model's modules raise
        raise ConfigError(f"it does not run on paged caches: {first_line(error)}") from error
    if not (mixed - alone).norm() <= TOLERANCES[dtype] * alone.norm():
        raise ConfigError("its tokens depend on others by more than attention")


def _run_step(
    forward: Forward, chunks: Sequence[_Chunk], caches: list[LayerCache], device: torch.device
) -> Tensor:
    """Hidden states of the chunks' tokens, one chunk after the other."""
    lengths = torch.tensor([0, *(chunk.end - chunk.start for chunk in chunks)])
    slots = torch.cat(
        [chunk.sequence * BLOCK_SIZE + torch.arange(chunk.start, chunk.end) for chunk in chunks]
    )
    inputs = AttentionInputs(
        num_decodes=0,
        slot_mapping=slots.to(device),
        block_tables=torch.tensor([[chunk.sequence] for chunk in chunks], dtype=torch.int32, device=device),
        query_start=lengths.cumsum(0).int().to(device),
        seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
    )
    positions = (slots % BLOCK_SIZE).to(device)
    token_ids = slots.int().to(device) + 1
    return forward(token_ids, positions, caches, inputs)
