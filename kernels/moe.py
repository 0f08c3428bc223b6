"""Linear layers of a mixture of experts: the tokens of all experts in one op (grouped matrix product).

Each token chooses a few experts. The choices are sorted by expert on the device, so the host need not know how many
tokens an expert has, and a step can be recorded as a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import on_gpu
from .quantized_linear import PACKED, QuantizedWeight, dequantize


class ExpertChoices(NamedTuple):
    """The P = T * top_k choices of T tokens, sorted by expert.

    With expert parallelism a rank has X of `num_experts` experts, and choices of other ranks' experts have no result
    on it.

    Attributes:
        order: [P] int32, choices by expert, and by token within an expert; choice i is of token ``i // top_k``.
            Entries from ``starts[X]`` on are valid choices, but arbitrary ones.
        starts: [X + 1] int32, where the choices of each of the X experts start in `order`; the last is P, or fewer
            if there are other experts.
        top_k: choices of each token.
        num_experts: of all ranks.
    """

    order: Tensor
    starts: Tensor
    top_k: int
    num_experts: int

    @property
    def is_partial(self) -> bool:
        """Return whether other ranks have experts."""
        return len(self.starts) - 1 < self.num_experts


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights [N, K] of one linear layer of all X experts.

    Attributes:
        codes: [X, N, K] of the tokens' dtype, or quantized, as in QuantizedWeight.
        scales, zeros, group_index: of quantized weights, as in QuantizedWeight, stacked; None otherwise.
        bias: [X, N], or None.
    """

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group_index: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Return whether a byte holds two numbers."""
        return self.codes.dtype in PACKED

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return an expert's weight, [N, K]."""
        if self.scales is None:
            return self.codes[expert]
        zeros = None if self.zeros is None else self.zeros[expert]
        index = None if self.group_index is None else self.group_index[expert]
        return dequantize(QuantizedWeight(self.codes[expert], self.scales[expert], zeros, index)).to(dtype)


@on_gpu("moe")
def sort_choices(expert_ids: Tensor, num_experts: int, own: range | None = None) -> ExpertChoices:
    """Sort the choices [T, top_k] int64 of T tokens by expert; ties keep their order.

    Args:
        own: the experts that this rank has; None for all.
    """
    own = range(num_experts) if own is None else own
    expert_ids = expert_ids - own.start
    is_own = (expert_ids >= 0) & (expert_ids < len(own))
    chosen, order = expert_ids.where(is_own, len(own)).flatten().sort(stable=True)
    bounds = torch.arange(len(own) + 1, dtype=chosen.dtype, device=chosen.device)
    starts = torch.searchsorted(chosen, bounds).int()
    return ExpertChoices(order.int(), starts, expert_ids.shape[1], num_experts)


@on_gpu("moe")
def scatter_linear(x: Tensor, weights: ExpertWeights, choices: ExpertChoices) -> Tensor:
    """Multiply each token by the weights of its experts: [T, K] -> [P, N], sorted by expert.

    Rows of other ranks' experts have arbitrary numbers.
    """
    return _multiply(x[choices.order.long() // choices.top_k], weights, choices)


@on_gpu("moe")
def gather_linear(x: Tensor, weights: ExpertWeights, choices: ExpertChoices, factors: Tensor) -> Tensor:
    """Multiply rows sorted by expert, and add up those of each token: [P, K] -> [T, N].

    Rows of other ranks' experts add nothing.

    Args:
        factors: [T, top_k] float32, multiply the experts' results.
    """
    terms = _terms(x, weights, choices, factors)
    return terms.view(*factors.shape, -1).sum(dim=1).to(x.dtype)


@on_gpu("moe")
def gather_terms(x: Tensor, weights: ExpertWeights, choices: ExpertChoices, factors: Tensor) -> Tensor:
    """As `gather_linear`, but do not add up the terms: [P, K] -> [P, N], by choice."""
    return _terms(x, weights, choices, factors).to(x.dtype)


def _terms(x: Tensor, weights: ExpertWeights, choices: ExpertChoices, factors: Tensor) -> Tensor:
    """Return the terms by choice, [P, N] float32."""
    products = _multiply(x, weights, choices)
    by_choice = torch.empty_like(products)
    by_choice[choices.order.long()] = products
    return by_choice.float() * factors.view(-1, 1)


def _multiply(rows: Tensor, weights: ExpertWeights, choices: ExpertChoices) -> Tensor:
    """Multiply rows sorted by expert: [P, K] -> [P, N]; those of other ranks' experts are 0."""
    counts = choices.starts.diff().tolist()
    parts = rows[: sum(counts)].split_with_sizes(counts)
    biases = [None] * len(parts) if weights.bias is None else weights.bias
    products = [
        F.linear(part, weights.matrix(index, rows.dtype), bias)
        for index, (part, bias) in enumerate(zip(parts, biases, strict=True))
    ]
    return torch.cat([*products, rows.new_zeros(len(rows) - sum(counts), weights.codes.shape[1])])
