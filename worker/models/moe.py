"""A mixture of experts: each token goes through the few feed-forward networks that a router chooses for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights.linear_weight import LinearWeight
from ..weights.weight_slice import WeightSlice
from .layers import LoadContext
from .spec import Experts


class MixtureOfExperts:
    """Gated feed-forward experts; every rank holds a part of each one's intermediate numbers.

    Args:
        activate: the experts' gate, [T, 2 I] -> [T, I].
        name: of the layer whose feed-forward network this is.
    """

    def __init__(
        self,
        load: LoadContext,
        experts: Experts,
        hidden_size: int,
        activate: Callable[[Tensor], Tensor],
        name: str,
    ) -> None:
        self.comm = load.comm
        self.experts = experts
        self.activate = activate
        # Mixtral's published checkpoints have a name of their own for the block and its parts.
        has_own_names = load.checkpoint.has(f"{name}.block_sparse_moe.gate.weight")
        block = f"{name}.block_sparse_moe" if has_own_names else f"{name}.mlp"
        parts = ("w1", "w3", "w2") if has_own_names else ("gate_proj", "up_proj", "down_proj")
        self.router = load.whole(f"{block}.gate.weight", experts.count, hidden_size)
        if load.checkpoint.has(f"{block}.experts.gate_up_proj"):
            _name_fused_experts(load, experts, hidden_size, f"{block}.experts", parts)
        self.gate_up: list[LinearWeight] = []
        self.down: list[LinearWeight] = []
        inner, shard = experts.intermediate_size, load.shard(experts.intermediate_size)
        for index in range(experts.count):
            gate, up, down = (f"{block}.experts.{index}.{part}" for part in parts)
            rows = [WeightSlice(own, (inner, hidden_size), 0, shard.start, len(shard)) for own in (gate, up)]
            self.gate_up.append(load.linear(rows))
            self.down.append(
                load.linear([WeightSlice(down, (hidden_size, inner), 1, shard.start, len(shard))])
            )

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        weights, chosen = self._route(x)
        weights, chosen = weights.view(-1, 1), chosen.flatten()
        counts = chosen.bincount(minlength=self.experts.count).tolist()
        y = torch.zeros_like(x)
        # Each expert's share of the choices; which token made a choice follows from its place.
        for index, own in enumerate(chosen.argsort(stable=True).split_with_sizes(counts)):
            if len(own):
                tokens = own // self.experts.per_token
                out = self.down[index].multiply(self.activate(self.gate_up[index].multiply(x[tokens])))
                y.index_add_(0, tokens, out.mul_(weights[own]))
        return self.comm.all_reduce(y)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights in x's dtype and ids of each token's experts, both [T, per_token]."""
        probabilities = F.linear(x, self.router).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts.per_token, dim=-1)
        if self.experts.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


def _name_fused_experts(
    load: LoadContext, experts: Experts, hidden_size: int, name: str, parts: tuple[str, str, str]
) -> None:
    """Has the checkpoint know each expert's matrices by their own names where it stores all experts' as one tensor.

    Transformers 5 stores ``gate_up_proj``, [experts, 2 I, E], and ``down_proj``, [experts, E, I].
    """
    inner = experts.intermediate_size
    gate_up, down = (experts.count, 2 * inner, hidden_size), (experts.count, hidden_size, inner)
    gate_part, up_part, down_part = parts
    for index in range(experts.count):
        own, rename = f"{name}.{index}", load.checkpoint.alias_rows
        rename(f"{own}.{gate_part}.weight", f"{name}.gate_up_proj", gate_up, index, 0, inner)
        rename(f"{own}.{up_part}.weight", f"{name}.gate_up_proj", gate_up, index, inner, inner)
        rename(f"{own}.{down_part}.weight", f"{name}.down_proj", down, index, 0, hidden_size)
