"""Linear layers and experts in float8 by DeepGEMM (DeepSeek-AI, 2025): a scale per block of 128 by 128 numbers.

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

from ...kernels.activation import GatedActivation
from ...kernels.moe import ExpertChoices, ExpertWeights
from ...kernels.quantized_linear import FLOAT8, QuantizedWeight, quantize_tokens
from ...proto.config import EngineConfig
from ...proto.model.quantization import read_quantization
from ..weights.linear_weight import LinearWeight, QuantizedLinearWeight
from .installed import DEEP_GEMM, Capability, Library

BLOCK = 128
# Mean choices per expert from which on its grouped products are used: its tiles have 128 rows of one expert, while
# those of quire's kernels have as few as 16. Not measured yet.
MIN_CHOICES = 32
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
    def find_problem(config: EngineConfig, capability: Capability) -> str:
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


@dataclass(frozen=True, slots=True)
class BlockFloat8Experts:
    """The experts of one layer in float8, multiplied by tokens in float8 in two grouped products.

    Attributes:
        gate_up, down: codes [X, N, K] float8 and scales [X, N / BLOCK, K / BLOCK] float32 of each product.
        gemm: DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``.
        alignment: an expert's rows begin at multiples of it.
    """

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    gemm: Callable[..., None]
    alignment: int

    def suits(self, num_choices: int) -> bool:
        """Return whether a step has enough choices for the library's tiles."""
        return num_choices >= MIN_CHOICES * len(self.down[0])

    def forward(
        self, x: Tensor, choices: ExpertChoices, factors: Tensor, activation: GatedActivation
    ) -> Tensor:
        """[T, E] -> [T, E]; the host reads nothing from the device.

        Args:
            factors: [T, top_k] float32, multiply the experts' results.
        """
        layout, sources, places = _align(choices, self.alignment)
        tokens = (part.index_select(0, sources) for part in _quantize(x))
        inner = activation(self._multiply(tuple(tokens), self.gate_up, layout, x.dtype))
        products = self._multiply(_quantize(inner), self.down, layout, x.dtype)
        # Rows that no product has written may be NaN.
        terms = products.index_select(0, places.clamp_min(0)).masked_fill_((places < 0).unsqueeze(1), 0.0)
        return (terms.view(*factors.shape, -1) * factors.unsqueeze(2)).sum(dim=1).to(x.dtype)

    def _multiply(
        self, rows: tuple[Tensor, ...], weights: tuple[Tensor, Tensor], layout: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows [M, K], as bytes and their scales, by the weights of their experts: [M, N]."""
        codes, scales = rows
        out = torch.empty(len(codes), weights[0].shape[1], dtype=dtype, device=codes.device)
        self.gemm((codes.view(FLOAT8), scales), weights, out, layout)
        return out


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] -> float8 codes as bytes, [T, K], and a scale per BLOCK numbers, [T, K / BLOCK] float32."""
    codes, scales = quantize_tokens(x.reshape(-1, BLOCK))
    return codes.view(torch.uint8).view(x.shape), scales.view(len(x), -1)


def _align(choices: ExpertChoices, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place the P choices in rows of which each expert's begin at a multiple of `alignment`.

    Returns:
        the expert of each of M rows, [M] int32, -1 for rows without a choice; the token of each row, [M]; and the
        row of each choice, [P], -1 for those of other ranks' experts. M depends on the numbers of choices and
        experts only.
    """
    starts = choices.starts.long()
    num_experts, num_choices, device = len(starts) - 1, len(choices.order), starts.device
    counts = starts.diff()
    aligned = (counts + alignment - 1) // alignment * alignment
    ends = aligned.cumsum(0)
    num_rows = num_choices + min(num_experts, num_choices) * (alignment - 1)
    rows = torch.arange(-(-num_rows // alignment) * alignment, device=device)
    expert = torch.searchsorted(ends, rows, right=True)
    own = expert.clamp_max(num_experts - 1)
    place = rows - (ends - aligned)[own]
    is_choice = (expert < num_experts) & (place < counts[own])
    choice = choices.order.long()[(starts[own] + place).clamp(0, max(0, num_choices - 1))]
    sources = (choice // choices.top_k).where(is_choice, 0)
    # Rows without a choice write behind the end.
    places = torch.full((num_choices + 1,), -1, dtype=torch.int64, device=device)
    places.scatter_(0, choice.where(is_choice, num_choices), rows)
    return expert.where(is_choice, -1).int(), sources, places[:-1]


class DeepGemmExperts:
    """ExpertsBackend with DeepGEMM.

    Args:
        module: the imported package.

    Attributes:
        num_converted, num_others: mixtures whose prompts DeepGEMM multiplies, and those that it does not.
    """

    library: ClassVar[Library] = DEEP_GEMM

    def __init__(self, module: Any) -> None:
        self._gemm: Callable[..., None] = module.m_grouped_fp8_gemm_nt_contiguous
        self._alignment: int = module.get_mk_alignment_for_contiguous_layout()
        self.num_converted = self.num_others = 0

    @classmethod
    def load(cls, device: torch.device) -> DeepGemmExperts:
        """Import the installed library."""
        return cls(importlib.import_module("deep_gemm"))

    @staticmethod
    def find_problem(config: EngineConfig, capability: Capability) -> str:
        """Return why it would compute no layer of a model; as for linear layers."""
        return DeepGemm.find_problem(config, capability)

    def convert(self, gate_up: ExpertWeights, down: ExpertWeights) -> BlockFloat8Experts | None:
        scales = [_expert_scales(each) for each in (gate_up, down)]
        if any(each is None for each in scales):
            self.num_others += 1
            return None
        self.num_converted += 1
        first, last = (
            (each.codes, own) for each, own in zip((gate_up, down), scales, strict=True) if own is not None
        )
        return BlockFloat8Experts(first, last, self._gemm, self._alignment)

    def describe(self) -> str:
        return (
            f"DeepGEMM for steps with {MIN_CHOICES} choices per expert and more in {self.num_converted} layers, "
            f"Triton kernels for the others and in {self.num_others} more layers"
        )


def _expert_scales(weights: ExpertWeights) -> Tensor | None:
    """Return the scale of each block of all experts, [X, N / BLOCK, K / BLOCK]. Returns None if they have none."""
    if weights.scales is None or weights.bias is not None or weights.zeros is not None:
        return None
    if weights.group_index is not None:
        return None
    of_experts = []
    for codes, scales in zip(weights.codes, weights.scales, strict=True):
        of_blocks = _block_scales(QuantizedWeight(codes, scales))
        if of_blocks is None:
            return None
        of_experts.append(of_blocks)
    return torch.stack(of_experts)


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
