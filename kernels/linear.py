"""Linear layers whose weight is packed once for the processor.

On a CPU, F.linear reorders the weight in every call, which at 1 to 32 tokens takes longer than the product. Weights
are packed in panels instead, which the C++ ops multiply at memory bandwidth for few tokens and at the rate of the
arithmetic for many (native/panels.h). Weights that the C++ ops do not multiply are packed by oneDNN, in a layout that
only oneDNN reads, or stay unchanged.

Weights are placed on huge pages where the system has them: TLB misses otherwise cost a step that reads all weights 5
to 13 % of its time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import GATED_ACTIVATIONS
from .native.fallbacks import log_fallback
from .native.library import is_available
from .native.memory import copy_to_huge_pages
from .native.panels import (
    Panels,
    can_gate,
    gated_panel_linear,
    gather_rows,
    inputs_per_row,
    panel_len,
    panel_linear,
)

# oneDNN packs a weight for a given number of tokens. A weight packed for 32 was as fast at 1 to 1,024 tokens as one
# packed for that number, so one layout serves decode and prefill. For 1 token oneDNN does not pack at all.
ONE_DNN_TOKENS = 32
_PANEL_DTYPES = (torch.float32, torch.bfloat16)


class Layout(enum.Enum):
    """Memory layout of a weight: panels, oneDNN's own, or unchanged."""

    PANELS = enum.auto()
    ONE_DNN = enum.auto()
    PLAIN = enum.auto()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight [N, K] of a linear layer.

    Attributes:
        panels: of a weight in the layout PANELS.
    """

    weight: Tensor
    layout: Layout = Layout.PLAIN
    panels: Panels | None = None

    @property
    def can_embed(self) -> bool:
        """Return whether `embed` supports this weight."""
        return self.layout is Layout.PLAIN or self.panels is not None


def pack(weight: Tensor) -> PackedWeight:
    """Pack a weight [N, K]; the original is not needed afterwards."""
    if weight.dtype in _PANEL_DTYPES and _supports_panels(weight):
        return _pack_panels(weight)
    if weight.is_cpu:
        log_fallback("linear layers", _why_without_panels(weight))
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
    return _pack_panels(codes, scales.float().contiguous()) if _supports_panels(codes) else None


def narrow(weight: PackedWeight) -> PackedWeight:
    """Return a copy in bfloat16 of a weight in float32 panels; other weights as they are.

    `linear` multiplies float32 tokens by it in about half the time, with the errors of bfloat16.
    """
    panels = weight.panels
    if panels is None or panels.dtype != torch.float32 or panels.in_features % inputs_per_row(torch.bfloat16):
        return weight
    rows = weight.weight.squeeze(-1).transpose(1, 2).reshape(-1, panels.in_features)
    return _pack_panels(rows[: panels.out_features].bfloat16())


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: [T, K] -> [T, N], in the dtype of x."""
    if weight.panels is not None:
        return panel_linear(x.contiguous(), weight.panels, bias)
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
    if weight.panels is not None and can_gate(weight.panels):
        return gated_panel_linear(x.contiguous(), weight.panels, gate, bias)
    return GATED_ACTIVATIONS[gate](linear(x, weight, bias))


def embed(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return rows of a weight [N, K] that can_embed: [T] -> [T, K]."""
    if weight.layout is Layout.PLAIN:
        return F.embedding(token_ids, weight.weight)
    assert weight.panels is not None
    return gather_rows(weight.panels, token_ids.long(), dtype)


def _supports_one_dnn(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies in this dtype on this processor; bfloat16 is supported on some."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _supports_panels(weight: Tensor) -> bool:
    return weight.is_cpu and is_available() and weight.shape[1] % inputs_per_row(weight.dtype) == 0


def _why_without_panels(weight: Tensor) -> str:
    if weight.dtype not in _PANEL_DTYPES:
        return f"weights of {weight.dtype} are not packed in panels"
    row_inputs = inputs_per_row(weight.dtype)
    return f"weights of {weight.dtype} with {weight.shape[1]} inputs, no multiple of {row_inputs}, have no panels"


def _pack_panels(weight: Tensor, scales: Tensor | None = None) -> PackedWeight:
    out_features, in_features = weight.shape
    num_panels, row_inputs = -(-out_features // panel_len()), inputs_per_row(weight.dtype)
    num_missing = num_panels * panel_len() - out_features
    padded = F.pad(weight, (0, 0, 0, num_missing)) if num_missing else weight
    packed = copy_to_huge_pages(padded.reshape(num_panels, panel_len(), -1, row_inputs).transpose(1, 2))
    panels = Panels(
        packed.data_ptr(), panel_len() * in_features, in_features, out_features, weight.dtype, scales
    )
    return PackedWeight(packed, Layout.PANELS, panels)
