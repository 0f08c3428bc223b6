"""Linear layers with weights of 8 or 4 bits per number and a scale per group of inputs.

Weight-only quantization (int8, int4, float8, float4): codes are converted to the tokens' dtype as they are read. With
tokens in float8 as well (Micikevicius et al., *FP8 Formats for Deep Learning*, 2022) a GPU multiplies 8-bit numbers;
then each token and each output has a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import has_kernels, on_gpu

FLOAT8 = torch.float8_e4m3fn
FLOAT4 = torch.float4_e2m1fn_x2
# The number of each float4 code.
FLOAT4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The code that a row's largest magnitude is mapped to.
LARGEST = {FLOAT8: 448.0, torch.int8: 127.0}
# Dtypes of codes with two numbers per byte.
PACKED = (torch.uint8, FLOAT4)
# torch._scaled_mm requires both sizes of a float8 weight to be multiples of this.
FLOAT8_MULTIPLE = 16
# Inputs per scale of float8 weights whose tokens have a scale for as many.
FLOAT8_GROUP = 128


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight [N, K] of a linear layer as ``(codes - zeros) * scales``.

    Attributes:
        codes: [N, K] int8 or float8_e4m3fn; or [N, K / 2], two numbers per byte, the even input in the lower half:
            uint8 for numbers from 0 to 15, float4_e2m1fn_x2 for the codes of FLOAT4_NUMBERS.
        scales: [G, N], per group of inputs and output.
        zeros: [G, N] int16; None: all are 0.
        group_index: [K] int32, the group of each input; None: G runs of equal length.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_index: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.is_packed else 1)

    @property
    def is_packed(self) -> bool:
        """Return whether a byte holds two numbers."""
        return self.codes.dtype in PACKED

    @property
    def is_per_output(self) -> bool:
        """Return whether there is one scale per output and no zeros, so that scaling may follow the sum."""
        return self.scales.shape[0] == 1 and self.zeros is None

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """Return the weight of outputs `start` to `end`."""
        zeros = None if self.zeros is None else self.zeros[:, start:end]
        return QuantizedWeight(self.codes[start:end], self.scales[:, start:end], zeros, self.group_index)

    def reordered(self, outputs: list[int]) -> QuantizedWeight:
        """Return the weight of these outputs, in this order."""
        index = torch.tensor(outputs, device=self.codes.device)
        # torch indexes no float4.
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)
        zeros = None if self.zeros is None else self.zeros[:, index]
        return QuantizedWeight(codes, self.scales[:, index], zeros, self.group_index)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the weight on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        index = None if self.group_index is None else self.group_index.to(device)
        return QuantizedWeight(self.codes.to(device), self.scales.to(device), zeros, index)


def quantize(weight: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> QuantizedWeight:
    """Quantize a weight [N, K] to int8 or float8_e4m3fn, rounding to nearest, with one scale per output.

    Args:
        largest: [N], largest magnitude per output, if `weight` is a slice of the inputs; None: that of `weight`.
    """
    weight = weight.float()
    largest = weight.abs().amax(dim=1) if largest is None else largest.float()
    # A row of zeros may have any scale.
    scales = torch.where(largest > 0, largest / LARGEST[dtype], 1.0)
    return QuantizedWeight(_round(weight / scales.unsqueeze(1), dtype), scales.unsqueeze(0))


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return the weight as [N, K] float32."""
    codes = unpack_nibbles(weight.codes.view(torch.uint8)) if weight.is_packed else weight.codes
    groups = weight.group_index
    if groups is None:
        groups = torch.arange(weight.in_features, device=codes.device)
        groups = groups // (weight.in_features // weight.scales.shape[0])
    if weight.codes.dtype == FLOAT4:
        numbers = torch.tensor(FLOAT4_NUMBERS, device=codes.device)[codes.int()]
    else:
        numbers = codes.float()
    if weight.zeros is not None:
        numbers -= weight.zeros.t().float()[:, groups]
    if weight.scales.shape[0] == 1:
        return numbers.mul_(weight.scales.t().float())
    return numbers.mul_(weight.scales.t().float()[:, groups])


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack [N, K] numbers from 0 to 15, K even -> [N, K / 2] uint8."""
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert pack_nibbles: [N, K / 2] uint8 -> [N, K] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


@on_gpu("quantized_linear")
def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: [T, K] -> [T, N], in the dtype of x."""
    return F.linear(x, dequantize(weight).to(x.dtype), bias)


@on_gpu("quantize_tokens")
def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize tokens to float8, one scale per token.

    Args:
        x: [T, K].

    Returns:
        Codes [T, K] float8_e4m3fn, and scales [T, 1] float32 that multiply them.
    """
    largest = x.float().abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST[FLOAT8], 1.0)
    return _round(x.float() / scales, FLOAT8), scales


def has_quantized_kernel(weight: QuantizedWeight) -> bool:
    """Return whether quantized_linear reads codes directly, without dequantizing the whole weight in each call."""
    if not has_kernels(weight.codes):
        return False
    # Triton converts float8 on Ada and later.
    return weight.codes.dtype != FLOAT8 or torch.cuda.get_device_capability(weight.codes.device) >= (8, 9)


def supports_float8_linear(weight: QuantizedWeight) -> bool:
    """Return whether float8_linear supports this weight on its device: Hopper or later, and suitable sizes."""
    return (
        weight.codes.is_cuda
        and weight.codes.dtype == FLOAT8
        and weight.is_per_output
        and weight.out_features % FLOAT8_MULTIPLE == weight.in_features % FLOAT8_MULTIPLE == 0
        and torch.cuda.get_device_capability(weight.codes.device) >= (9, 0)
    )


def supports_float8_groups(weight: QuantizedWeight) -> bool:
    """Return whether float8_groups_linear supports this weight on its device: Hopper or later, and its groups."""
    return (
        has_kernels(weight.codes)
        and weight.codes.dtype == FLOAT8
        and weight.zeros is None
        and weight.group_index is None
        and weight.in_features == FLOAT8_GROUP * weight.scales.shape[0]
        and torch.cuda.get_device_capability(weight.codes.device) >= (9, 0)
    )


@on_gpu("float8_groups")
def float8_groups_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As quantized_linear, with tokens quantized to float8 too, a scale per token and FLOAT8_GROUP inputs.

    Args:
        weight: float8, with a scale per output and FLOAT8_GROUP inputs, which may be equal within blocks of outputs.
    """
    codes, scales = quantize_tokens(x.reshape(-1, FLOAT8_GROUP))
    tokens = (codes.float() * scales).view(x.shape)
    y = F.linear(tokens, dequantize(weight))
    return (y if bias is None else y + bias.float()).to(x.dtype)


class Float8Tokens(NamedTuple):
    """Tokens quantized by quantize_tokens.

    Attributes:
        codes: [T, K] float8_e4m3fn.
        scales: [T, 1] float32 that multiply the codes.
        dtype: of the original tokens, and of the results.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


def float8_linear(x: Tensor | Float8Tokens, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As quantized_linear, with tokens quantized to float8 too; the weight is float8 with one scale per output."""
    codes, scales, dtype = x if isinstance(x, Float8Tokens) else (*quantize_tokens(x), x.dtype)
    if not codes.is_cuda:
        y = F.linear(codes.float(), weight.codes.float()) * scales * weight.scales.float()
        return y.to(dtype) if bias is None else (y + bias.float()).to(dtype)
    # With a scale per row, torch returns the product in bfloat16 only. Fast accumulation adds in the precision of the
    # tensor cores, as other engines do for inference.
    product: Tensor = torch._scaled_mm(
        codes, weight.codes.t(), scales, weight.scales.float(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    product = product.to(dtype)
    return product if bias is None else product.add_(bias)


def _round(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, clamped to LARGEST."""
    limit = LARGEST[dtype]
    return (numbers if dtype.is_floating_point else numbers.round()).clamp(-limit, limit).to(dtype)
