"""Linear layers whose weight is laid out once for the processor that multiplies by it.

On a CPU, F.linear rearranges the weight in every call, which at 1 to 32 tokens takes longer than the product.
oneDNN's own layout, made once, is 1.5 to 5 times as fast there and never slower. Where that layout is one of panels
of 64 outputs, which it is in float32 and bfloat16 on AVX2 and AVX-512, our own product reads it at the speed of
memory. What oneDNN does not multiply by, bfloat16 on AVX2 and int8, is laid out in such panels here: with 512 tokens
that is as fast as float32, and with one token 2 and 3.5 times.

Weights lie on huge pages where the system has some: a step that reads them all otherwise waits for the addresses of
pages as well, for 5 to 13 % of its time.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .native.library import is_available
from .native.memory import use_huge_pages
from .native.panels import PANEL_LEN, Panels, max_linear_tokens, panel_linear, panel_rows, row_inputs

# oneDNN lays a weight out for a number of tokens. Laid out for 32 it was as fast at 1 to 1,024 tokens as laid out
# for any of them, except that for 1 it does nothing, so one layout serves decoding and prompts.
LAYOUT_TOKENS = 32


class Layout(enum.Enum):
    """How the numbers of a weight lie: as they were, as oneDNN wants them, or in panels that oneDNN does not know."""

    PLAIN = enum.auto()
    ONE_DNN = enum.auto()
    PANELS = enum.auto()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight [N, K] of a linear layer.

    Attributes:
        panels: where the numbers are known to lie in panels, and a library that computes on those is there.
    """

    weight: Tensor
    layout: Layout = Layout.PLAIN
    panels: Panels | None = None

    @property
    def can_embed(self) -> bool:
        """Whether `embed` can read it."""
        return self.layout is Layout.PLAIN or self.panels is not None


def pack(weight: Tensor) -> PackedWeight:
    """Lays a weight [N, K] out; it is not needed afterwards."""
    if _can_pack(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAYOUT_TOKENS)
        use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
        return PackedWeight(packed, Layout.ONE_DNN, _panels_of(packed, weight))
    if weight.dtype == torch.bfloat16 and _takes_panels(weight):
        return _pack_panels(weight)
    return PackedWeight(weight)


def pack_int8(codes: Tensor, scales: Tensor) -> PackedWeight | None:
    """Lays out ``codes * scales`` for the CPU; None where nothing computes on it.

    Args:
        codes: [N, K] int8.
        scales: [N], one an output.
    """
    return _pack_panels(codes, scales.float().contiguous()) if _takes_panels(codes) else None


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: [T, K] -> [T, N], in the dtype of x."""
    if weight.layout is Layout.PLAIN:
        return F.linear(x, weight.weight, bias)
    if weight.panels is not None and (
        weight.layout is Layout.PANELS or (x.shape[0] <= max_linear_tokens() and x.is_contiguous())
    ):
        return panel_linear(x.contiguous(), weight.panels, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.weight, bias, "none", [], "")
    return y


def embed(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of a weight [N, K] that can_embed: [T] -> [T, K]."""
    if weight.layout is Layout.PLAIN:
        return F.embedding(token_ids, weight.weight)
    assert weight.panels is not None
    return panel_rows(weight.panels, token_ids.long(), dtype)


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies in this dtype here, as it does in bfloat16 on some processors."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _takes_panels(weight: Tensor) -> bool:
    return weight.is_cpu and is_available() and weight.shape[1] % row_inputs(weight.dtype) == 0


def _pack_panels(weight: Tensor, scales: Tensor | None = None) -> PackedWeight:
    out_features, in_features = weight.shape
    num_panels, depth = -(-out_features // PANEL_LEN), row_inputs(weight.dtype)
    missing = num_panels * PANEL_LEN - out_features
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    packed = padded.reshape(num_panels, PANEL_LEN, -1, depth).transpose(1, 2).contiguous()
    use_huge_pages(packed.data_ptr(), packed.nbytes)
    panels = Panels(
        packed.data_ptr(), PANEL_LEN * in_features, in_features, out_features, weight.dtype, scales
    )
    return PackedWeight(packed, Layout.PANELS, panels)


def _panels_of(packed: Tensor, weight: Tensor) -> Panels | None:
    """Where the panels are and how long each is. oneDNN's layouts are its own affair, so every number is compared."""
    out_features, in_features = weight.shape
    depth = row_inputs(weight.dtype)
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    num_panels = -(-out_features // PANEL_LEN)
    panel_len, rest = divmod(num_bytes // weight.element_size(), num_panels)
    if (
        not is_available()
        or rest
        or in_features % depth
        or panel_len % (PANEL_LEN * depth)
        or panel_len < PANEL_LEN * in_features
    ):
        return None
    address = torch.ops.mkldnn.data_ptr(packed)
    numbers = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=weight.dtype)
    for index, panel in enumerate(numbers.view(num_panels, -1, PANEL_LEN, depth)):
        rows = weight[index * PANEL_LEN : (index + 1) * PANEL_LEN]
        if not torch.equal(panel.transpose(0, 1).reshape(PANEL_LEN, -1)[: len(rows), :in_features], rows):
            return None
    return Panels(address, panel_len, in_features, out_features, weight.dtype)
