"""OpCase: one op at one shape, with inputs that are made when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.gpu.sizes import Sizes

Op = Callable[[], object]
# Index of a set of inputs |-> a call on inputs of its own.
MakeOp = Callable[[int], Op]

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class OpCase:
    """One op at one shape.

    Attributes:
        num_bytes: bytes that the op must read and write.
        flops: floating-point operations; 0 if negligible beside the bytes.
        peers: other implementations of the same op.
    """

    name: str
    device: str
    num_bytes: int
    flops: int
    make: MakeOp
    peers: Mapping[str, MakeOp] = field(default_factory=dict)


def random(sizes: Sizes, *shape: int) -> Tensor:
    """Return normal random numbers in the type and on the device of a run."""
    return torch.randn(shape, device=sizes.device).to(getattr(torch, sizes.dtype))


def shuffled_tables(sizes: Sizes, rows: int, length: int) -> tuple[Tensor, int]:
    """Return block tables [rows, M] int32 in random order, and the number of blocks with the scratch block."""
    num_blocks = rows * -(-length // BLOCK_SIZE)
    tables = (torch.randperm(num_blocks, device=sizes.device) + 1).int().view(rows, -1)
    return tables, num_blocks + 1


def slots_of(tables: Tensor, num_tokens: int) -> Tensor:
    """Return the slots of the first tokens of one sequence, [num_tokens] int64."""
    offsets = torch.arange(BLOCK_SIZE, device=tables.device)
    return (tables.long().view(-1, 1) * BLOCK_SIZE + offsets).view(-1)[:num_tokens].contiguous()
