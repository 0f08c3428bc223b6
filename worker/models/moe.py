"""Mixture of experts: a router sends each token through a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.activation import GATED_ACTIVATIONS
from ...kernels.dispatch import has_kernels
from ...kernels.moe import ExpertWeights, gather_linear, scatter_linear, sort_choices
from ..weights.expert_weights import stack_experts
from ..weights.linear_weight import LinearWeight
from ..weights.weight_slice import WeightSlice
from .expert_routing import ExpertRouter
from .layers import ColumnParallelLinear, Projection
from .load_context import LoadContext
from .spec import Experts

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The experts' layers one by one: on a CPU, and for experts that are stored in different formats.

    Attributes:
        gate_up, down: of each expert.
        activation: [T, 2 I] -> [T, I].
    """

    gate_up: Sequence[LinearWeight]
    down: Sequence[LinearWeight]
    activation: Activation

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the sum of the experts' results, [T, E]; reads the number of each expert's tokens on the host.

        Args:
            x: [T, E].
            factors, expert_ids: [T, per_token], of each token's experts.
        """
        per_token = expert_ids.shape[1]
        factors, expert_ids = factors.to(x.dtype).view(-1, 1), expert_ids.flatten()
        counts = expert_ids.bincount(minlength=len(self.down)).tolist()
        y = torch.zeros_like(x)
        # Choices sorted by expert; choice i was made by token i // per_token.
        for index, own in enumerate(expert_ids.argsort(stable=True).split_with_sizes(counts)):
            if len(own):
                tokens = own // per_token
                out = self.down[index].multiply(self.activation(self.gate_up[index].multiply(x[tokens])))
                y.index_add_(0, tokens, out.mul_(factors[own]))
        return y


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """All experts at once on a GPU; the attributes and `forward` are those of ExpertLayers."""

    gate_up: ExpertWeights
    down: ExpertWeights
    activation: Activation

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """As ExpertLayers, but the host reads nothing from the device."""
        choices = sort_choices(expert_ids, len(self.down.codes))
        inner = self.activation(scatter_linear(x, self.gate_up, choices))
        return gather_linear(inner, self.down, choices, factors)


def group_experts(layers: ExpertLayers) -> GroupedExperts | None:
    """Return the layers for a GPU. Returns None if the experts are stored in different formats."""
    gate_up, down = stack_experts(layers.gate_up), stack_experts(layers.down)
    return None if gate_up is None or down is None else GroupedExperts(gate_up, down, layers.activation)


class SharedExperts:
    """A gated feed-forward network that every token passes besides its experts; sharded over the ranks.

    Args:
        gate: activation (kernels.activation).
    """

    def __init__(
        self, load: LoadContext, intermediate_size: int, hidden_size: int, gate: str, name: str
    ) -> None:
        shard = load.shard(intermediate_size)
        projections = [Projection(f"{name}.{part}_proj", shard) for part in ("gate", "up")]
        self.gate_up = ColumnParallelLinear(load, projections, hidden_size, bias=False)
        shape = hidden_size, intermediate_size
        self.down = load.linear([WeightSlice(f"{name}.down_proj", shape, 1, shard.start, len(shard))])
        self.gate = gate

    def forward_partial(self, x: Tensor) -> Tensor:
        """[T, E] -> this rank's addend of the sum over the ranks, [T, E]."""
        return self.down.multiply(self.gate_up.forward_gated(x, self.gate))


class MixtureOfExperts:
    """Gated feed-forward experts; each expert's intermediate dimension is sharded over the ranks.

    Args:
        gate: activation of the experts (kernels.activation).
        name: of the decoder layer.

    Attributes:
        reads_back: `forward` reads values back from the device, which a recording cannot do.
    """

    def __init__(
        self,
        load: LoadContext,
        experts: Experts,
        hidden_size: int,
        gate: str,
        name: str,
    ) -> None:
        self.comm = load.comm
        # Mixtral's published checkpoints have other names for the block and its matrices.
        is_mixtral = load.checkpoint.has(f"{name}.block_sparse_moe.gate.weight")
        block = f"{name}.block_sparse_moe" if is_mixtral else f"{name}.mlp"
        matrices = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        self.router = ExpertRouter(load, experts, hidden_size, f"{block}.gate")
        if load.checkpoint.has(f"{block}.experts.gate_up_proj"):
            _alias_fused_experts(load, experts, hidden_size, f"{block}.experts", matrices)
        gate_up: list[LinearWeight] = []
        down: list[LinearWeight] = []
        inner, shard = experts.intermediate_size, load.shard(experts.intermediate_size)
        for index in range(experts.count):
            gate_name, up_name, down_name = (f"{block}.experts.{index}.{matrix}" for matrix in matrices)
            rows = [
                WeightSlice(own, (inner, hidden_size), 0, shard.start, len(shard))
                for own in (gate_name, up_name)
            ]
            gate_up.append(load.linear(rows))
            columns = WeightSlice(down_name, (hidden_size, inner), 1, shard.start, len(shard))
            down.append(load.linear([columns]))
        layers = ExpertLayers(gate_up, down, GATED_ACTIVATIONS[gate])
        grouped = group_experts(layers) if has_kernels(self.router.weight) else None
        self.experts: ExpertLayers | GroupedExperts = layers if grouped is None else grouped
        self.shared: SharedExperts | None = None
        if experts.shared_intermediate_size:
            name = f"{block}.shared_experts"
            self.shared = SharedExperts(load, experts.shared_intermediate_size, hidden_size, gate, name)

    @property
    def reads_back(self) -> bool:
        return isinstance(self.experts, ExpertLayers)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        part = self.experts.forward(x, *self.router.choose(x))
        if self.shared is not None:
            part += self.shared.forward_partial(x)
        return self.comm.all_reduce(part)


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
