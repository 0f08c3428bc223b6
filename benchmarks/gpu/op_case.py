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
# Of an op in bfloat16: each number is rounded once, by up to 2**-9 of it, perhaps after other partial sums.
TOLERANCE = 1e-2
# Numbers between the rows of strided tensors. A comparison gives the reference other strides than the kernel.
row_gap = 0


@dataclass(frozen=True, slots=True)
class OpCase:
    """One op at one shape.

    Attributes:
        num_bytes: bytes that the op must read and write.
        flops: floating-point operations; 0 if negligible beside the bytes.
        peers: other implementations of the same op.
        tolerance: largest error beside the reference, relative in the Frobenius norm, or share of other integers.
    """

    name: str
    device: str
    num_bytes: int
    flops: int
    make: MakeOp
    peers: Mapping[str, MakeOp] = field(default_factory=dict)
    tolerance: float = TOLERANCE


def random(sizes: Sizes, *shape: int) -> Tensor:
    """Return normal random numbers in the type and on the device of a run."""
    return torch.randn(shape, device=sizes.device).to(getattr(torch, sizes.dtype))


def strided(sizes: Sizes, *shape: int) -> Tensor:
    """Return what `random` does, with `row_gap` numbers between the rows, as in a slice of a fused projection."""
    return with_gaps(random(sizes, *shape))


def with_gaps(numbers: Tensor) -> Tensor:
    """Return the numbers with `row_gap` others between the entries of the first dimension."""
    if not row_gap:
        return numbers
    rows = numbers.new_zeros(len(numbers), numbers[0].numel() + row_gap)
    return rows[:, : numbers[0].numel()].view(numbers.shape).copy_(numbers)


def rotations(sizes: Sizes, num_tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return `cos` and `sin` of a rotary embedding as kernels.rope defines them, [num_tokens, dim] each."""
    angles = torch.arange(num_tokens, device=sizes.device)[:, None] / 100 ** torch.linspace(
        0, 1, dim // 2, device=sizes.device
    )
    dtype, cos, sin = getattr(torch, sizes.dtype), angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=1).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype)


def shuffled_tables(sizes: Sizes, rows: int, length: int) -> tuple[Tensor, int]:
    """Return block tables [rows, M] int32 in random order, and the number of blocks with the scratch block."""
    num_blocks = rows * -(-length // BLOCK_SIZE)
    tables = (torch.randperm(num_blocks, device=sizes.device) + 1).int().view(rows, -1)
    return tables, num_blocks + 1


def slots_of(tables: Tensor, num_tokens: int) -> Tensor:
    """Return the slots of the first tokens of one sequence, [num_tokens] int64."""
    offsets = torch.arange(BLOCK_SIZE, device=tables.device)
    return (tables.long().view(-1, 1) * BLOCK_SIZE + offsets).view(-1)[:num_tokens].contiguous()
