"""Linear layers whose weight is laid out once for the processor that multiplies by it.

On a CPU, F.linear rearranges the weight in every call, which at 1 to 32 tokens takes longer than the product.
oneDNN's own layout, made once, is 1.5 to 5 times as fast there and never slower. Where that layout is one of panels
of 64 outputs, which it is on AVX2 and AVX-512, our own product reads it at the speed of memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu

# oneDNN lays a weight out for a number of tokens. Laid out for 32 it was as fast at 1 to 1,024 tokens as laid out
# for any of them, except that for 1 it does nothing, so one layout serves decoding and prompts.
LAYOUT_TOKENS = 32
PANEL_LEN = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight [N, K] of a linear layer.

    Attributes:
        weight: as oneDNN keeps it where `is_packed`, as it was otherwise.
        panels: address of the packed numbers where they are known to lie as [N / 64, padded K, 64], and a library
            that computes on those is there; None otherwise.
        panel_stride: numbers of a panel.
    """

    out_features: int
    weight: Tensor
    is_packed: bool = False
    panels: int | None = None
    panel_stride: int = 0


def pack(weight: Tensor) -> PackedWeight:
    """Lays a weight [N, K] out; it is not needed afterwards."""
    out_features = weight.shape[0]
    if not _can_pack(weight):
        return PackedWeight(out_features, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAYOUT_TOKENS)
    panels, panel_stride = _panels_of(packed, weight)
    return PackedWeight(out_features, packed, True, panels, panel_stride)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: [T, K] -> [T, N]."""
    if not weight.is_packed:
        return F.linear(x, weight.weight, bias)
    if weight.panels is not None and 0 < x.shape[0] <= cpu.max_linear_tokens() and x.is_contiguous():
        return cpu.panel_linear(x, weight.panels, weight.panel_stride, weight.out_features, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.weight, bias, "none", [], "")
    return y


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies in this dtype here, as it does in bfloat16 on some processors."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _panels_of(packed: Tensor, weight: Tensor) -> tuple[int | None, int]:
    """Where the panels are and how long each is. oneDNN's layouts are its own affair, so every number is compared."""
    out_features, in_features = weight.shape
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    num_panels = -(-out_features // PANEL_LEN)
    panel_len, rest = divmod(num_bytes // weight.element_size(), num_panels)
    if (
        weight.dtype != torch.float32
        or cpu.ops() is None
        or rest
        or panel_len % PANEL_LEN
        or panel_len < PANEL_LEN * in_features
    ):
        return None, 0
    address = torch.ops.mkldnn.data_ptr(packed)
    numbers = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=weight.dtype)
    panels = numbers.view(num_panels, -1, PANEL_LEN)[:, :in_features]
    for index, panel in enumerate(panels):
        rows = weight[index * PANEL_LEN : (index + 1) * PANEL_LEN]
        if not torch.equal(panel[:, : len(rows)], rows.t()):
            return None, 0
    return address, panel_len
