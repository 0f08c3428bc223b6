"""PackedExperts: the experts of a mixture on a CPU, in one call into C++ (native/experts.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .activation import GatedActivation
from .decode_layers import native_linear
from .linear import PackedWeight
from .native import experts as native
from .native import packed_quantized as native_codes
from .native.decode_layers import Linear
from .native.library import dtype_codes, gate_codes, library
from .native.ops import address_of
from .native.packed_weights import panel_len
from .packed_quantized import PackedQuantized

AnyPackedWeight = PackedWeight | PackedQuantized


class PackedExperts:
    """The experts of one layer that a rank has.

    Args:
        gate_up, down: of each expert, [2 I, E], or [I, E] without gates, and [E, I]; both supported (`supports`).
        gate_up_bias, down_bias: [X, 2 I] and [X, E], or None.
        first: index of the first expert among those of all ranks.
        scaled_inputs: the factors multiply the inputs of experts, not their results.
        dtype: that quantized weights are dequantized to; that of the tokens.

    Attributes:
        count: of the experts.
        dtype: as the argument.
    """

    def __init__(
        self,
        gate_up: Sequence[AnyPackedWeight],
        down: Sequence[AnyPackedWeight],
        activation: GatedActivation,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        first: int = 0,
        *,
        scaled_inputs: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        native.check_layout()
        self.first, self.count = first, len(down)
        self.dtype, self._settings = dtype, (activation, scaled_inputs)
        alpha, limit, offset = activation.clamp or (0.0, 0.0, 0.0)
        codes = [[_codes(weight) for weight in weights] for weights in (gate_up, down)]
        self._kept = gate_up, down, gate_up_bias, down_bias, codes  # keep the memory alive
        self._weights = (native.Expert * len(down))(
            *map(
                native.Expert,
                _linears(gate_up, gate_up_bias, dtype),
                _linears(down, down_bias, dtype),
                *([_address(own) for own in each] for each in codes),
            )
        )
        self._native = native.Experts(
            experts=ctypes.addressof(self._weights),
            count=self.count,
            first=first,
            gate=native.UNGATED_RELU_SQUARED
            if activation.gate == "relu_squared"
            else gate_codes()[activation.gate],
            is_clamped=activation.clamp is not None,
            scales_inputs=scaled_inputs,
            alpha=alpha,
            limit=limit,
            offset=offset,
        )

    def with_experts(self, places: Sequence[int], others: PackedExperts) -> PackedExperts:
        """Return these experts with others in some of their places."""
        gate_up, down = list(self._kept[0]), list(self._kept[1])
        biases = [None if bias is None else bias.clone() for bias in self._kept[2:4]]
        for index, place in enumerate(places):
            gate_up[place], down[place] = others._kept[0][index], others._kept[1][index]
        for bias, other in zip(biases, others._kept[2:4], strict=True):
            if bias is not None and other is not None:
                bias[list(places)] = other
        activation, scaled_inputs = self._settings
        return PackedExperts(
            gate_up,
            down,
            activation,
            biases[0],
            biases[1],
            self.first,
            scaled_inputs=scaled_inputs,
            dtype=self.dtype,
        )

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the sum of the experts' results, [T, E]; choices of other ranks' experts add nothing.

        Args:
            x: [T, E] in the dtype of the weights, unless these are in int8.
            factors: [T, top_k] float32, of each token's experts.
            expert_ids: [T, top_k] int64.
        """
        assert x.shape[1] == self._weights[0].gate_up.in_features
        assert factors.dtype == torch.float32
        assert expert_ids.dtype == torch.int64
        assert factors.shape == expert_ids.shape
        x, factors, expert_ids = x.contiguous(), factors.contiguous(), expert_ids.contiguous()
        out = torch.empty_like(x)
        library().quire_experts(
            ctypes.addressof(self._native), dtype_codes()[x.dtype], x.data_ptr(), factors.data_ptr(),
            expert_ids.data_ptr(), out.data_ptr(), *expert_ids.shape, torch.get_num_threads(),
        )  # fmt: skip
        return out


def supports(weights: Sequence[AnyPackedWeight]) -> bool:
    """Return whether C++ multiplies these weights of one linear layer: all are packed, and in one format."""
    formats = {_format_of(weight) for weight in weights}
    return len(formats) == 1 and None not in formats


def _format_of(weight: AnyPackedWeight) -> tuple[object, ...] | None:
    own = weight if isinstance(weight, PackedQuantized) else weight.matrix
    return None if own is None else (type(own), own.dtype, own.in_features, own.out_features)


def _linears(weights: Sequence[AnyPackedWeight], biases: Tensor | None, dtype: torch.dtype) -> list[Linear]:
    own = [None] * len(weights) if biases is None else biases
    return [_linear(weight, bias, dtype) for weight, bias in zip(weights, own, strict=True)]


def _linear(weight: AnyPackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    if not isinstance(weight, PackedQuantized):
        return native_linear(weight.matrix, bias)
    return Linear(
        bias=address_of(bias),
        dtype=dtype_codes()[dtype],
        in_features=weight.in_features,
        out_features=weight.out_features,
        stride=weight.in_features * panel_len(),
    )


def _codes(weight: AnyPackedWeight) -> native_codes.PackedQuantized | None:
    return weight.native() if isinstance(weight, PackedQuantized) else None


def _address(struct: ctypes.Structure | None) -> int | None:
    return None if struct is None else ctypes.addressof(struct)
