"""Mixture of experts: a router sends each token through a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights.linear_weight import LinearWeight
from ..weights.weight_slice import WeightSlice
from .load_context import LoadContext
from .spec import Experts


class MixtureOfExperts:
    """Gated feed-forward experts; each expert's intermediate dimension is sharded over the ranks.

    Args:
        activation: of the experts, [T, 2 I] -> [T, I].
        name: of the decoder layer.
    """

    def __init__(
        self,
        load: LoadContext,
        experts: Experts,
        hidden_size: int,
        activation: Callable[[Tensor], Tensor],
        name: str,
    ) -> None:
        self.comm = load.comm
        self.experts = experts
        self.activation = activation
        # Mixtral's published checkpoints have other names for the block and its matrices.
        is_mixtral = load.checkpoint.has(f"{name}.block_sparse_moe.gate.weight")
        block = f"{name}.block_sparse_moe" if is_mixtral else f"{name}.mlp"
        matrices = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        self.router = load.replicated(f"{block}.gate.weight", experts.count, hidden_size)
        if load.checkpoint.has(f"{block}.experts.gate_up_proj"):
            _alias_fused_experts(load, experts, hidden_size, f"{block}.experts", matrices)
        self.gate_up: list[LinearWeight] = []
        self.down: list[LinearWeight] = []
        inner, shard = experts.intermediate_size, load.shard(experts.intermediate_size)
        for index in range(experts.count):
            gate, up, down = (f"{block}.experts.{index}.{matrix}" for matrix in matrices)
            rows = [WeightSlice(own, (inner, hidden_size), 0, shard.start, len(shard)) for own in (gate, up)]
            self.gate_up.append(load.linear(rows))
            self.down.append(
                load.linear([WeightSlice(down, (hidden_size, inner), 1, shard.start, len(shard))])
            )

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        weights, expert_ids = self._route(x)
        weights, expert_ids = weights.view(-1, 1), expert_ids.flatten()
        counts = expert_ids.bincount(minlength=self.experts.count).tolist()
        y = torch.zeros_like(x)
        # Choices sorted by expert; choice i was made by token i // per_token.
        for index, own in enumerate(expert_ids.argsort(stable=True).split_with_sizes(counts)):
            if len(own):
                tokens = own // self.experts.per_token
                out = self.down[index].multiply(self.activation(self.gate_up[index].multiply(x[tokens])))
                y.index_add_(0, tokens, out.mul_(weights[own]))
        return self.comm.all_reduce(y)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights in x's dtype and expert ids, both [T, per_token]."""
        probabilities = F.linear(x, self.router).softmax(dim=-1, dtype=torch.float32)
        weights, expert_ids = probabilities.topk(self.experts.per_token, dim=-1)
        if self.experts.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), expert_ids


def _alias_fused_experts(
    load: LoadContext, experts: Experts, hidden_size: int, name: str, matrices: tuple[str, str, str]
) -> None:
    """Give each expert's matrices names of their own in a checkpoint that stores all experts as one tensor.

    Transformers 5 stores ``gate_up_proj``, [experts, 2 I, E], and ``down_proj``, [experts, E, I].
    """
    inner, alias = experts.intermediate_size, load.checkpoint.alias_rows
    gate_up, down = (experts.count, 2 * inner, hidden_size), (experts.count, hidden_size, inner)
    gate_matrix, up_matrix, down_matrix = matrices
    for index in range(experts.count):
        own = f"{name}.{index}"
        alias(f"{own}.{gate_matrix}.weight", f"{name}.gate_up_proj", gate_up, index, 0, inner)
        alias(f"{own}.{up_matrix}.weight", f"{name}.gate_up_proj", gate_up, index, inner, inner)
        alias(f"{own}.{down_matrix}.weight", f"{name}.down_proj", down, index, 0, hidden_size)
