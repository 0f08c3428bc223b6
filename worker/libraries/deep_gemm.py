"""Linear layers in float8 by DeepGEMM (DeepSeek-AI, 2025): weights with a scale per block of 128 by 128 numbers.

Tokens are quantized to float8 with a scale per 128 inputs, so that tensor cores multiply 8-bit numbers. The kernels
of quire keep the tokens' dtype instead; they remain the reference, and multiply by all other weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.quantized_linear import FLOAT8, QuantizedWeight, quantize_tokens
from ...proto.config import EngineConfig
from ...proto.model.quantization import read_quantization
from ..weights.linear_weight import LinearWeight, QuantizedLinearWeight
from .installed import DEEP_GEMM, Library

BLOCK = 128
# Outputs of a row of the result, which is written in pieces of 16 bytes.
OUTPUT_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class BlockFloat8Weight:
    """A weight [N, K] in float8, multiplied by tokens in float8.

    Attributes:
        codes: [N, K] float8.
        scales: [N / BLOCK, K / BLOCK] float32, the first rounded up.
        gemm: DeepGEMM's ``fp8_gemm_nt``.
    """

    codes: Tensor
    scales: Tensor
    gemm: Callable[..., None]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, K] -> [T, N]."""
        num_tokens, in_features = x.shape
        codes, scales = quantize_tokens(x.reshape(-1, BLOCK))
        tokens = codes.view(num_tokens, in_features), scales.view(num_tokens, in_features // BLOCK)
        out = torch.empty(num_tokens, len(self.codes), dtype=x.dtype, device=x.device)
        self.gemm(tokens, (self.codes, self.scales), out)
        return out if bias is None else out.add_(bias)


class DeepGemm:
    """LinearBackend with DeepGEMM.

    Args:
        module: the imported package.

    Attributes:
        num_converted, num_others: weights that DeepGEMM multiplies by, and that others do.
    """

    library: ClassVar[Library] = DEEP_GEMM

    def __init__(self, module: Any) -> None:
        self._gemm: Callable[..., None] = module.fp8_gemm_nt
        self.num_converted = self.num_others = 0

    @classmethod
    def load(cls, device: torch.device) -> DeepGemm:
        """Import the installed library."""
        return cls(importlib.import_module("deep_gemm"))

    @staticmethod
    def find_problem(config: EngineConfig) -> str:
        """Return why it would multiply by no weight of a model; empty if it multiplies by some."""
        quantization = read_quantization(config.model)
        if quantization is None or quantization.block_shape != (BLOCK, BLOCK):
            return f"the model has no float8 weights with a scale per block of {BLOCK} by {BLOCK}"
        if config.model.dtype != "bfloat16":
            return f"the model's dtype is {config.model.dtype}, its results are in bfloat16"
        return ""

    def convert(self, weight: LinearWeight) -> LinearWeight:
        scales = _block_scales(weight.quantized) if isinstance(weight, QuantizedLinearWeight) else None
        if scales is None or not isinstance(weight, QuantizedLinearWeight):
            self.num_others += 1
            return weight
        self.num_converted += 1
        return BlockFloat8Weight(weight.quantized.codes, scales, self._gemm)

    def describe(self) -> str:
        return f"DeepGEMM multiplies by {self.num_converted} weights, Triton kernels and torch by {self.num_others}"


def _block_scales(weight: QuantizedWeight) -> Tensor | None:
    """Return the scale of each block, [N / BLOCK, K / BLOCK]. Returns None if the weight has no such blocks.

    A rank's slice may begin inside a block.
    """
    num_outputs, num_inputs = weight.codes.shape
    if (
        weight.codes.dtype != FLOAT8
        or weight.zeros is not None
        or weight.group_index is not None
        or num_inputs != BLOCK * weight.scales.shape[0]
        or num_outputs % OUTPUT_MULTIPLE
    ):
        return None
    scales = weight.scales.float()
    of_blocks = scales[:, ::BLOCK]
    if not torch.equal(of_blocks.repeat_interleave(BLOCK, dim=1)[:, :num_outputs], scales):
        return None
    return of_blocks.t().contiguous()
