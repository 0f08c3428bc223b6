"""Products with float8 weights that have a scale per block of 128 by 128, as DeepSeek V3's, beside DeepGEMM's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.op_case import Op, OpCase, random
from benchmarks.gpu.sizes import Sizes
from quire.kernels.activation import GatedActivation
from quire.kernels.moe import ExpertWeights, gather_linear, scatter_linear, sort_choices
from quire.kernels.quantized_linear import FLOAT8, QuantizedWeight, float8_groups_linear
from quire.worker.libraries.deep_gemm import BLOCK, DeepGemm, DeepGemmExperts
from quire.worker.libraries.installed import DEEP_GEMM
from quire.worker.weights.linear_weight import QuantizedLinearWeight

ACTIVATION = GatedActivation("silu")


def block_float8_cases(sizes: Sizes, tokens: int) -> Iterator[OpCase]:
    """Yield the first projection of DeepSeek V3's attention, and experts of which each token takes 8 of 64."""
    is_large = sizes.device == "cuda"
    hidden, narrow, inner = (7168, 2112, 256) if is_large else (2 * BLOCK, BLOCK + 8, BLOCK)
    count, top_k = (64, 8) if is_large else (4, 2)
    fits = has_deep_gemm(sizes)

    def make_linear(index: int) -> Op:
        weight = _weight(sizes, narrow, hidden)
        return partial(float8_groups_linear, random(sizes, tokens, hidden), weight)

    def make_linear_peer(index: int) -> Op:
        weight = QuantizedLinearWeight(_weight(sizes, narrow, hidden))
        converted = DeepGemm.load(torch.device(sizes.device)).convert(weight)
        return partial(converted.multiply, random(sizes, tokens, hidden))

    def make_experts(index: int) -> Op:
        gate_up, down = _experts(sizes, count, 2 * inner, hidden), _experts(sizes, count, hidden, inner)
        x, expert_ids, factors = _draw(sizes, tokens, hidden, count, top_k)

        def forward() -> Tensor:
            choices = sort_choices(expert_ids, count)
            return gather_linear(ACTIVATION(scatter_linear(x, gate_up, choices)), down, choices, factors)

        return forward

    def make_experts_peer(index: int) -> Op:
        gate_up, down = _experts(sizes, count, 2 * inner, hidden), _experts(sizes, count, hidden, inner)
        converted = DeepGemmExperts.load(torch.device(sizes.device)).convert(gate_up, down)
        assert converted is not None
        x, expert_ids, factors = _draw(sizes, tokens, hidden, count, top_k)
        return lambda: converted.forward(x, sort_choices(expert_ids, count), factors, ACTIVATION)

    moved = 2 * tokens * (hidden + narrow)
    peers = {"deep_gemm": make_linear_peer} if fits else {}
    yield OpCase(
        f"linear.float8_blocks.{tokens}", sizes.device, narrow * hidden + moved,
        2 * tokens * narrow * hidden, make_linear, peers,
    )  # fmt: skip
    num_choices, num_numbers = tokens * top_k, 3 * inner * hidden
    peers = {"deep_gemm": make_experts_peer} if fits else {}
    yield OpCase(
        f"experts.float8_blocks.{tokens}", sizes.device, min(count, num_choices) * num_numbers,
        2 * num_choices * num_numbers, make_experts, peers,
    )  # fmt: skip


def has_deep_gemm(sizes: Sizes) -> bool:
    """Return whether DeepGEMM is installed and fits the device."""
    is_gpu = sizes.device == "cuda"
    return is_gpu and not DEEP_GEMM.find_problem(torch.cuda.get_device_capability(sizes.device))


def _weight(sizes: Sizes, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Return a random weight [N, K] whose scales [K / 128, N] are equal within blocks."""
    codes = torch.randn(num_outputs, num_inputs, device=sizes.device).to(FLOAT8)
    shape = num_inputs // BLOCK, -(-num_outputs // BLOCK)
    of_blocks = (torch.rand(shape, device=sizes.device) + 0.5) * num_inputs**-0.5
    return QuantizedWeight(codes, of_blocks.repeat_interleave(BLOCK, dim=1)[:, :num_outputs].contiguous())


def _experts(sizes: Sizes, count: int, num_outputs: int, num_inputs: int) -> ExpertWeights:
    weights = [_weight(sizes, num_outputs, num_inputs) for _ in range(count)]
    return ExpertWeights(
        torch.stack([each.codes for each in weights]), torch.stack([each.scales for each in weights])
    )


def _draw(sizes: Sizes, tokens: int, hidden: int, count: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and the experts and factors of each."""
    expert_ids = torch.rand(tokens, count, device=sizes.device).topk(top_k).indices
    return random(sizes, tokens, hidden), expert_ids, torch.rand(tokens, top_k, device=sizes.device)
