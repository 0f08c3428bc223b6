"""Linear layers whose weight is packed once for the processor.

On a CPU, F.linear reorders the weight in every call, which at 1 to 32 tokens takes longer than the product. Weights
are packed in panels instead, which the C++ ops multiply at memory bandwidth for few tokens and at the rate of the
arithmetic for many (packed_weights.h). The result of a token does not depend on the tokens beside it, which PyTorch's
and oneDNN's does. Only without the C++ ops weights are packed by oneDNN, in a layout that only oneDNN reads, or stay
unchanged. All products with weights on a CPU are computed here.

Weights are placed on huge pages where the system has them: TLB misses otherwise cost a step that reads all weights 5
to 13 % of its time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import GATED_ACTIVATIONS
from .native.library import is_available
from .native.memory import copy_to_huge_pages
from .native.packed_weights import (
    PackedMatrix,
    can_gate,
    gated_packed_linear,
    gather_rows,
    inputs_per_row,
    packed_linear,
    packed_linear_heads,
    panel_len,
)

# oneDNN packs a weight for a given number of tokens. A weight packed for 32 was as fast at 1 to 1,024 tokens as one
# packed for that number, so one layout serves decode and prefill. For 1 token oneDNN does not pack at all.
ONE_DNN_TOKENS = 32
_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layout(enum.Enum):
    """Memory layout of a weight: packed, packed with inputs of zeros behind its own, oneDNN's own, or unchanged."""

    PACKED = enum.auto()
    PADDED = enum.auto()
    ONE_DNN = enum.auto()
    PLAIN = enum.auto()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight [N, K] of a linear layer.

    Attributes:
        matrix: of a weight in the layout PACKED.
        padded: of a weight in the layout PADDED.
    """

    weight: Tensor
    layout: Layout = Layout.PLAIN
    matrix: PackedMatrix | None = None
    padded: PackedMatrix | None = None

    @property
    def can_embed(self) -> bool:
        """Return whether `embed` supports this weight."""
        return self.layout is Layout.PLAIN or self.matrix is not None


def pack(weight: Tensor) -> PackedWeight:
    """Pack a weight [N, K]; the original is not needed afterwards."""
    if weight.dtype in _PACKED_DTYPES and _supports_packing(weight):
        return _pack(weight)
    if _supports_one_dnn(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ONE_DNN_TOKENS)
        return PackedWeight(packed, Layout.ONE_DNN)
    return PackedWeight(weight)


def pack_int8(codes: Tensor, scales: Tensor) -> PackedWeight | None:
    """Pack ``codes * scales`` for the CPU. Returns None if no op supports it.

    Args:
        codes: [N, K] int8.
        scales: [N], one per output.
    """
    return _pack(codes, scales.float().contiguous()) if _supports_packing(codes) else None


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """A weight [H, N, K] of each head.

    Attributes:
        matrix: of all heads, one after the other; None without C++ ops.
    """

    weight: Tensor
    shape: tuple[int, int, int]
    matrix: PackedMatrix | None = None

    def part(self, heads: slice) -> PackedHeads:
        """Return the weight of some adjacent heads."""
        first, end, _ = heads.indices(self.shape[0])
        shape, matrix = (end - first, self.shape[1], self.shape[2]), self.matrix
        if matrix is None:
            return PackedHeads(self.weight[heads], shape)
        head_bytes = self.weight.nbytes // self.shape[0]
        address = matrix.address + first * head_bytes
        return PackedHeads(self.weight, shape, replace(matrix, address=address))


def pack_heads(weight: Tensor) -> PackedHeads:
    """Pack the weight [H, N, K] of each head; the original is not needed afterwards."""
    num_heads, out_features, in_features = weight.shape
    if weight.dtype not in _PACKED_DTYPES or not _supports_packing(weight[0]):
        return PackedHeads(weight, (num_heads, out_features, in_features))
    num_rows, num_inputs = -out_features % panel_len(), -in_features % inputs_per_row(weight.dtype)
    packed = _pack(F.pad(weight, (0, num_inputs, 0, num_rows)).flatten(0, 1))
    return PackedHeads(packed.weight, (num_heads, out_features, in_features), packed.matrix or packed.padded)


def linear_heads(x: Tensor, weight: PackedHeads) -> Tensor:
    """Multiply by the transpose of each head's weight: [T, H, K] -> [T, H, N]; x may be expanded along H."""
    num_heads, out_features, in_features = weight.shape
    if weight.matrix is None:
        return torch.bmm(x.transpose(0, 1), weight.weight.mT).transpose(0, 1)
    num_missing = weight.matrix.in_features - in_features
    x = F.pad(x, (0, num_missing)) if num_missing else x
    return packed_linear_heads(x, weight.matrix, num_heads, out_features)


def narrow(weight: PackedWeight) -> PackedWeight:
    """Return a copy in bfloat16 of a weight that is packed in float32; other weights as they are.

    `linear` multiplies float32 tokens by it in about half the time, with the errors of bfloat16.
    """
    matrix = weight.matrix
    if matrix is None or matrix.dtype != torch.float32 or matrix.in_features % inputs_per_row(torch.bfloat16):
        return weight
    rows = weight.weight.squeeze(-1).transpose(1, 2).reshape(-1, matrix.in_features)
    return _pack(rows[: matrix.out_features].bfloat16())


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: [T, K] -> [T, N], in the dtype of x."""
    if weight.matrix is not None:
        return packed_linear(x.contiguous(), weight.matrix, bias)
    if weight.padded is not None:
        return packed_linear(F.pad(x, (0, weight.padded.in_features - x.shape[1])), weight.padded, bias)
    if weight.layout is Layout.PLAIN:
        return F.linear(x, weight.weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.weight, bias, "none", [], "")
    return y


def gated_linear(x: Tensor, weight: PackedWeight, gate: str, bias: Tensor | None = None) -> Tensor:
    """Return the gated activation of a linear layer's outputs: [T, K] -> [T, N / 2].

    Args:
        weight: [N, K], the gate projection's rows and then the up projection's.
        gate: a key of GATED_ACTIVATIONS.
    """
    if weight.matrix is not None and can_gate(weight.matrix):
        return gated_packed_linear(x.contiguous(), weight.matrix, gate, bias)
    return GATED_ACTIVATIONS[gate](linear(x, weight, bias))


def embed(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return rows of a weight [N, K] that can_embed: [T] -> [T, K]."""
    if weight.layout is Layout.PLAIN:
        return F.embedding(token_ids, weight.weight)
    assert weight.matrix is not None
    return gather_rows(weight.matrix, token_ids.long(), dtype)


def _supports_one_dnn(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies in this dtype on this processor; bfloat16 is supported on some."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _supports_packing(weight: Tensor) -> bool:
    return weight.is_cpu and is_available()


def _pack(weight: Tensor, scales: Tensor | None = None) -> PackedWeight:
    out_features, in_features = weight.shape
    num_panels, row_inputs = -(-out_features // panel_len()), inputs_per_row(weight.dtype)
    num_missing, num_inputs = num_panels * panel_len() - out_features, -in_features % row_inputs
    padded = F.pad(weight, (0, num_inputs, 0, num_missing)) if num_missing or num_inputs else weight
    packed = copy_to_huge_pages(padded.reshape(num_panels, panel_len(), -1, row_inputs).transpose(1, 2))
    in_features += num_inputs
    matrix = PackedMatrix(
        packed.data_ptr(), panel_len() * in_features, in_features, out_features, weight.dtype, scales
    )
    if num_inputs:
        return PackedWeight(packed, Layout.PADDED, padded=matrix)
    return PackedWeight(packed, Layout.PACKED, matrix)
