"""Mixture of experts: a router sends each token through a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.activation import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS, GatedActivation, sigmoid
from ....kernels.dispatch import has_kernels
from ....kernels.linear import linear, pack
from ....kernels.moe import ExpertWeights, gather_linear, gather_terms, scatter_linear, sort_choices
from ....kernels.packed_experts import PackedExperts, supports
from ....proto.model.experts import Experts
from ...comm.expert_exchange import Dispatched
from ...libraries.experts_backend import OWN_EXPERTS, ExpertsBackend, LibraryExperts
from ...lora.expert_adapters import ExpertAdapters
from ...weights.expert_weights import stack_experts
from ...weights.linear_weight import LinearWeight, any_packed_weight, without_codes
from ...weights.weight_slice import WeightSlice
from ..layers import ColumnParallelLinear, Projection, ScaledNorm
from ..load_context import LoadContext
from .expert_layers import AdaptedExperts, ExpertLayers
from .expert_layout import (
    expert_slices,
    find_block,
    find_correction,
    find_shared,
    read_expert_biases,
)
from .expert_routing import ExpertRouter
from .replicas import OneReplica, Replicas


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """All experts at once on a GPU; the attributes and `forward` are those of ExpertLayers.

    Attributes:
        adapters: None without adapters.
        library: computes the steps that suit it; None if there is no library, or it does not support the experts.
        norm: of each expert's result; None for none.
    """

    gate_up: ExpertWeights
    down: ExpertWeights
    activation: GatedActivation
    num_experts: int
    first_expert: int = 0
    scaled_inputs: bool = False
    adapters: ExpertAdapters | None = None
    library: LibraryExperts | None = None
    norm: ScaledNorm | None = None

    def take_experts(self, places: Sequence[int], others: GroupedExperts) -> None:
        """Overwrite the experts of some places, in the memory that recorded steps read."""
        index = list(places)
        for own, other in ((self.gate_up, others.gate_up), (self.down, others.down)):
            for name in ("codes", "scales", "zeros", "group_index", "bias"):
                tensor, taken = getattr(own, name), getattr(other, name)
                if tensor is not None and taken is not None:
                    tensor[index] = taken

    def forward(
        self, x: Tensor, factors: Tensor, expert_ids: Tensor, adapter_slots: Tensor | None = None
    ) -> Tensor:
        """As ExpertLayers, but the host reads nothing from the device.

        Args:
            adapter_slots: [T] int32, of the tokens' LoRA adapters, see StepAdapters; None without any.
        """
        own = range(self.first_expert, self.first_expert + len(self.down.codes))
        choices = sort_choices(expert_ids, self.num_experts, own)
        if self.library is not None and self.library.suits(expert_ids.numel()):
            return self.library.forward(x, choices, factors, self.activation)
        gate_up = scatter_linear(x, self.gate_up, choices)
        adapters = None
        if self.adapters is not None and adapter_slots is not None:
            adapters = self.adapters.of_choices(choices, adapter_slots)
            adapters.scatter_gate_up(gate_up, x)
        if self.scaled_inputs:
            # The layer has no bias, so its results may be scaled instead of its inputs.
            gate_up *= factors.view(-1, 1).index_select(0, choices.order)
            factors = torch.ones_like(factors)
        inner, factors = self.activation(gate_up), factors.contiguous()
        if adapters is None and self.norm is None:
            return gather_linear(inner, self.down, choices, factors)
        weights = factors if self.norm is None else torch.ones_like(factors)
        terms = gather_terms(inner, self.down, choices, weights)
        if adapters is not None:
            adapters.add_terms(terms, inner, weights)
        terms = terms.view(*factors.shape, -1)
        if self.norm is None:
            return terms.sum(dim=1)
        return (self.norm.apply(terms) * factors.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def group_experts(
    layers: ExpertLayers, adapters: ExpertAdapters | None = None, backend: ExpertsBackend = OWN_EXPERTS
) -> GroupedExperts | None:
    """Return the layers for a GPU. Returns None if the experts are stored in different formats."""
    gate_up = stack_experts(layers.gate_up, layers.gate_up_bias)
    down = stack_experts(layers.down, layers.down_bias)
    if gate_up is None or down is None:
        return None
    is_plain = adapters is None and not layers.scaled_inputs and layers.norm is None
    return GroupedExperts(
        gate_up,
        down,
        layers.activation,
        layers.num_experts,
        layers.first_expert,
        layers.scaled_inputs,
        adapters,
        backend.convert(gate_up, down) if is_plain else None,
        layers.norm,
    )


def packed_experts(layers: ExpertLayers, dtype: torch.dtype) -> PackedExperts | None:
    """Return the layers for a CPU. Returns None if not all weights are packed, or they differ in format.

    Nor does it multiply experts whose activated gates have a limit, or whose results have a norm.

    Args:
        dtype: of the tokens.
    """
    if layers.activation.limit or layers.norm is not None:
        return None
    gate_up, down = (
        [packed for packed in map(any_packed_weight, weights) if packed is not None]
        for weights in (layers.gate_up, layers.down)
    )
    if not len(gate_up) == len(down) == len(layers.down) or not (supports(gate_up) and supports(down)):
        return None
    return PackedExperts(
        gate_up,
        down,
        layers.activation,
        layers.gate_up_bias,
        layers.down_bias,
        layers.first_expert,
        scaled_inputs=layers.scaled_inputs,
        dtype=dtype,
    )


def dequantize_experts(layers: ExpertLayers) -> ExpertLayers:
    """Return the layers with weights that are multiplied one by one without dequantizing them in every step."""
    gate_up, down = ([*map(without_codes, weights)] for weights in (layers.gate_up, layers.down))
    return replace(layers, gate_up=gate_up, down=down)


class SharedExperts:
    """A gated feed-forward network that every token passes besides its experts; sharded over the ranks.

    Args:
        gate: activation (kernels.activation).
    """

    def __init__(self, load: LoadContext, experts: Experts, hidden_size: int, gate: str, name: str) -> None:
        intermediate_size = experts.shared_intermediate_size
        shard = load.shard(intermediate_size)
        parts_of_first = ("gate", "up") if experts.gated else ("up",)
        projections = [Projection(f"{name}.{part}_proj", shard) for part in parts_of_first]
        if load.checkpoint.has_layer(f"{name}.gate_up_proj"):
            starts = 0, intermediate_size
            projections = [
                Projection(f"{name}.gate_up_proj", shard, start, 2 * intermediate_size) for start in starts
            ]
        self.gate_up = ColumnParallelLinear(load, projections, hidden_size, bias=experts.shared_bias)
        shape = hidden_size, intermediate_size
        parts = [WeightSlice(f"{name}.down_proj", shape, 1, shard.start, len(shard))]
        self.down, self.lora = load.linear_layer(parts), load.adapters(parts)
        bias = load.replicated(f"{name}.down_proj.bias", hidden_size) if experts.shared_bias else None
        self.down_bias = bias if load.comm.rank == 0 else None  # the ranks' results are added up
        self.gate, self._clamp = gate, experts.clamp if experts.clamps_shared else None
        self._limit = experts.limits[1]
        self.token_gate: TokenGate | None = None
        if experts.shared_gate:
            self.token_gate = TokenGate(load, hidden_size, f"{name}_gate")

    def forward_partial(self, x: Tensor) -> Tensor:
        """[T, E] -> this rank's addend of the sum over the ranks, [T, E]."""
        if self._clamp is not None or self._limit:
            inner = GatedActivation(self.gate, self._clamp, self._limit)(self.gate_up.forward(x))
        elif self.gate in GATED_ACTIVATIONS:
            inner = self.gate_up.forward_gated(x, self.gate)
        else:
            inner = UNGATED_ACTIVATIONS[self.gate](self.gate_up.forward(x))
        y = self.down.multiply(inner, self.down_bias)
        self.lora.add(y, inner)
        return y if self.token_gate is None else y.mul_(self.token_gate.forward(x))


class TokenGate:
    """Factor of each token's result of the shared experts; every rank holds it in full."""

    def __init__(self, load: LoadContext, hidden_size: int, name: str) -> None:
        self.weight = pack(load.replicated(f"{name}.weight", 1, hidden_size))
        self.lora = load.adapters([WeightSlice(name, (1, hidden_size), 0, 0, 1)])

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, 1]."""
        y = linear(x, self.weight)
        self.lora.add(y, x)
        return sigmoid(y)


class WithExperts:
    """Feed-forward network with experts."""

    experts: ExpertLayers | GroupedExperts | PackedExperts | AdaptedExperts

    def compute(self, tokens: Dispatched) -> Tensor:
        """Return the sums of this rank's experts' results, [R, E]."""
        if isinstance(self.experts, AdaptedExperts | GroupedExperts):
            return self.experts.forward(*tokens)
        return self.experts.forward(tokens.x, tokens.factors, tokens.slot_ids)

    @property
    def reads_back(self) -> bool:
        """True if `forward` reads values back from the device, which a recording cannot do."""
        return isinstance(self.experts, ExpertLayers | AdaptedExperts)

    @property
    def is_separate(self) -> bool:
        """True if the experts of tokens without an adapter are multiplied one by one."""
        plain = self.experts.plain if isinstance(self.experts, AdaptedExperts) else self.experts
        return isinstance(plain, ExpertLayers)


class MixtureOfExperts(WithExperts):
    """Gated feed-forward experts, sharded over the ranks: each expert's intermediate dimension, or whole experts.

    Args:
        gate: activation of the experts (kernels.activation), unless theirs is clamped.
        name: of the decoder layer.
    """

    def __init__(
        self,
        load: LoadContext,
        experts: Experts,
        hidden_size: int,
        gate: str,
        name: str,
    ) -> None:
        self.exchange, self.hidden_size = load.expert_exchange, hidden_size
        self.spec, self.gate = experts, gate
        block, router = find_block(load.checkpoint, name)
        self.block = block
        self.latents: tuple[LinearWeight, LinearWeight] | None = None
        if experts.latent_size:
            sizes = experts.latent_size, hidden_size
            first, last = (
                load.linear([WeightSlice(f"{block}.{own}_latent_proj", shape, 0, 0, shape[0])])
                for own, shape in (("fc1", sizes), ("fc2", sizes[::-1]))
            )
            self.latents = first, last
        self.lora = load.lora
        self.router = ExpertRouter(
            load.for_whole_networks(), experts, hidden_size, router, find_correction(load.checkpoint, block)
        )
        self.experts = read_experts(load, experts, experts.latent_size or hidden_size, gate, block)
        self.replicas: Replicas | OneReplica = OneReplica()
        if load.num_redundant_experts or load.balances_experts:
            num_slots, own = experts.count + load.num_redundant_experts, load.own_slots(experts.count)
            self.replicas = Replicas(
                experts.count, num_slots, load.comm.rank, load.comm.size, own, load.device
            )
        # The ranks' results are added up, so one of them adds that of experts that return their input.
        self._first_zero = experts.count if experts.num_zero and load.comm.rank == 0 else None
        self.shared: SharedExperts | None = None
        if experts.shared_intermediate_size:
            name = find_shared(load.checkpoint, block)
            self.shared = SharedExperts(load.for_whole_networks(), experts, hidden_size, gate, name)

    def read_more(self, load: LoadContext, own_experts: Sequence[int]) -> ExpertLayers:
        """Read some experts of this layer, for slots of this rank."""
        width = self.spec.latent_size or self.hidden_size
        return read_expert_layers(load, self.spec, width, self.gate, self.block, own_experts)

    def take_experts(self, places: Sequence[int], layers: ExpertLayers) -> None:
        """Compute other experts in some of this rank's places from now on."""
        experts = self.experts
        if isinstance(experts, GroupedExperts):
            grouped = group_experts(layers)
            assert grouped is not None, "the experts are stored in other formats"
            experts.take_experts(places, grouped)
        elif isinstance(experts, PackedExperts):
            packed = packed_experts(layers, experts.dtype)
            assert packed is not None, "the experts are stored in other formats"
            self.experts = experts.with_experts(places, packed)
        elif isinstance(experts, ExpertLayers):
            self.experts = experts.with_experts(places, dequantize_experts(layers))
        else:
            raise AssertionError("experts with adapters do not move")

    @property
    def reads_back(self) -> bool:
        return self.exchange.reads_back or super().reads_back

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        own = self.exchange.select(x)
        inner = self.expert_inputs(own)
        factors, expert_ids = self.router.choose(own)
        adapters = self.lora.step.sent_slots if self.exchange.is_whole else self.lora.step.token_slots
        flight = self.exchange.dispatch(
            Dispatched(inner, factors, self.replicas.choose(expert_ids), adapters)
        )
        shared = None if self.shared is None else self.shared.forward_partial(own)  # while tokens travel
        part = flight.combine(self.compute(flight.wait()))
        if self.latents is not None:
            part = self.latents[1].multiply(part)  # linear, so the ranks' results may be added up after it
        if self._first_zero is not None:
            part += own * (factors * (expert_ids >= self._first_zero)).sum(1, keepdim=True).to(x.dtype)
        if shared is not None:
            part += shared
        return self.exchange.gather(part, len(x))

    def expert_inputs(self, x: Tensor) -> Tensor:
        """Return what the experts read of each token: [T, E] -> [T, Experts.latent_size], or [T, E]."""
        return x if self.latents is None else self.latents[0].multiply(x)


def read_experts(
    load: LoadContext, experts: Experts, hidden_size: int, gate: str, block: str
) -> ExpertLayers | GroupedExperts | PackedExperts | AdaptedExperts:
    """Read this rank's part of the experts; all experts are computed at once, if they are stored alike.

    Args:
        gate: as for MixtureOfExperts.
        block: name of the mixture.
    """
    slices = expert_slices(load, experts, hidden_size, block, load.own_experts(experts.count))
    layers = read_expert_layers(load, experts, hidden_size, gate, block, load.own_experts(experts.count))
    adapters = load.expert_adapters(
        [expert.gate_up for expert in slices],
        [expert.down for expert in slices],
        f"{block}.experts",
        experts.count,
    )
    if has_kernels(load.empty(0)):
        # Experts that move overwrite weights and scales, of which a library may keep others.
        backend = OWN_EXPERTS if load.balances_experts else load.experts_backend
        grouped = group_experts(layers, adapters, backend)
        if grouped is not None:
            return grouped
    plain = packed_experts(layers, load.dtype) or dequantize_experts(layers)
    return plain if adapters is None else AdaptedExperts(plain, adapters, layers)


def read_expert_layers(
    load: LoadContext, experts: Experts, hidden_size: int, gate: str, block: str, own_experts: Sequence[int]
) -> ExpertLayers:
    """Read some experts as if they were in this rank's slots; the arguments are as for read_experts."""
    slices = expert_slices(load, experts, hidden_size, block, own_experts)
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if experts.interleaved:
        biases = read_expert_biases(load, experts, hidden_size, block, own_experts)
    norm: ScaledNorm | None = None
    if experts.result_eps:
        norm = ScaledNorm.read(load, f"{block}.experts.post_expert_norm", hidden_size, experts.result_eps)
    # Experts with adapters are multiplied one by one, by ops that would dequantize each in every step.
    keep_codes = not load.lora.num_slots
    return ExpertLayers(
        [load.linear(expert.gate_up, keep_codes=keep_codes) for expert in slices],
        [load.linear(expert.down, keep_codes=keep_codes) for expert in slices],
        GatedActivation(gate, experts.clamp, experts.limits[0]),
        experts.num_scored + load.num_redundant_experts,
        load.own_slots(experts.count).start,
        *biases,
        scaled_inputs=experts.scaled_inputs,
        norm=norm,
    )
