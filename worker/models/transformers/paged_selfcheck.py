"""Self-check of models that were not written for paged caches, run before they serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....proto.errors import ConfigError, QuireError, first_line
from ...attention import AttentionInputs, LayerCache

Forward = Callable[[Tensor, Tensor, list[LayerCache], AttentionInputs], Tensor]

BLOCK_SIZE = 16
# Tokens of each of the two sequences.
LENS = 7, 5
# Largest difference of hidden states due to rounding, relative to their norm.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens of a sequence that one step computes; sequence i has block i."""

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
    """Check that only attention mixes tokens.

    Two sequences computed in chunks in one batch must have the same hidden states as each sequence computed alone.

    Args:
        forward: of the model.
        head_shape: KV heads of this rank, and head_dim.

    Raises:
        ConfigError: the hidden states differ, or the model does not run; states the reason.
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
    except Exception as error:  # a model's modules may raise anything
        raise ConfigError(f"it does not run on paged caches: {first_line(error)}") from error
    if not (mixed - alone).norm() <= TOLERANCES[dtype] * alone.norm():
        raise ConfigError("its hidden states depend on other tokens of the batch by more than attention")


def _run_step(
    forward: Forward, chunks: Sequence[_Chunk], caches: list[LayerCache], device: torch.device
) -> Tensor:
    """Return the hidden states of the chunks' tokens, in the order of the chunks."""
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
