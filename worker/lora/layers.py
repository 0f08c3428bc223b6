"""LoraLayers: the linear layers of a model that adapters may change, and their slots on the device.

Tensor parallelism needs no collectives of its own. A column-parallel layer has all of A and its outputs' part of B. A
row-parallel layer has its inputs' part of A and all of B: the ranks' products add up in the layer's all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.lora import LoraFactors, LoraGroups, add_lora, make_factors
from ..weights.weight_slice import WeightSlice


@dataclass(frozen=True, slots=True)
class PartFactors:
    """An adapter's factors for one part of a layer, of this rank.

    Attributes:
        a: [R, K].
        b: [R, N], with the scaling.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """An adapter's factors for one layer of X experts, of this rank; an ordinary layer has one expert.

    Attributes:
        a: [X, P, R, K], R is the largest rank; P is 1 if all parts have the same.
        b: [X, R, N], with the scaling.
        ranks: [X, P] int32; 0 for a part that the adapter leaves unchanged.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A linear layer of all experts of a mixture.

    Attributes:
        module: name of the experts' module.
        name: of the layer within it: ``gate_up_proj`` or ``down_proj``.
        num_experts: of all ranks.
        first: index of this rank's first one.
    """

    module: str
    name: str
    num_experts: int
    first: int = 0

    @property
    def parameter(self) -> str:
        """Return the whole name of the stacked matrix."""
        return f"{self.module}.{self.name}"


class LoraLayer:
    """The adapters of one linear layer, or of one of all X experts that a rank has of a mixture.

    Args:
        parts: the layer's projections, as this rank stores them; those of one expert after the other.
        factors: of all slots; slot s of expert x is row ``s * X + x``.
        num_experts: X; 1 for an ordinary layer.

    Attributes:
        stack: None for an ordinary layer.
        is_embedding: the layer's inputs are the tokens of the vocabulary.
    """

    def __init__(
        self,
        model: LoraLayers,
        parts: Sequence[WeightSlice],
        factors: LoraFactors,
        num_experts: int = 1,
        stack: ExpertStack | None = None,
        *,
        is_embedding: bool = False,
    ) -> None:
        self._model = model
        self.parts = tuple(parts)
        self.factors = factors
        self.num_experts = num_experts
        self.stack = stack
        self.is_embedding = is_embedding

    @property
    def modules(self) -> Iterator[str]:
        """Yield the names of the stored layers, those of experts that only other ranks hold included."""
        if self.stack is None:
            yield from (part.name for part in self.parts)
            return
        own = f"{self.stack.module}.{self.stack.first}."
        for part in self.parts[: len(self.parts) // self.num_experts]:
            name = part.name.removeprefix(own)
            yield from (f"{self.stack.module}.{index}.{name}" for index in range(self.stack.num_experts))

    @property
    def stacked_shape(self) -> tuple[int, int]:
        """Return the outputs and inputs of one expert's matrix, with the outputs of all parts."""
        parts = self.parts[: len(self.parts) // self.num_experts]
        return sum(part.shape[0] for part in parts), parts[0].shape[1]

    @property
    def is_active(self) -> bool:
        """Return whether tokens of the present step have adapters."""
        return self._model.groups is not None

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters' outputs for the step's tokens to the layer's, in place.

        Args:
            y: [T, N].
            x: [T, K].
        """
        if self._model.groups is not None:
            self.add_rows(y, x, self._model.groups)

    def add_rows(self, y: Tensor, x: Tensor, groups: LoraGroups) -> None:
        """As `add`, for the rows of `groups`, whose slots are rows of `factors`."""
        add_lora(y, x.contiguous(), self.factors, groups)

    def pack(self, parts: Sequence[PartFactors | None]) -> LayerFactors | None:
        """Put an adapter's factors for the parts together. Returns None if it leaves all unchanged.

        Args:
            parts: None for a part that the adapter leaves unchanged.
        """
        ranks = [0 if part is None else len(part.a) for part in parts]
        if not any(ranks):
            return None
        factors, num_parts = self.factors, len(self.factors.bounds) - 1
        a = factors.a.new_zeros(self.num_experts, num_parts, max(ranks), factors.a.shape[3], device="cpu")
        b = factors.b.new_zeros(self.num_experts, max(ranks), factors.bounds[-1], device="cpu")
        for index, part in enumerate(parts):
            if part is not None:
                expert, own = divmod(index, num_parts)
                first, last = factors.bounds[own : own + 2]
                a[expert, own, : ranks[index]].copy_(part.a)
                b[expert, : ranks[index], first:last].copy_(part.b)
        return LayerFactors(a, b, torch.tensor(ranks, dtype=torch.int32).view(self.num_experts, num_parts))

    def put(self, slot: int, adapter: LayerFactors | None) -> None:
        """Copy an adapter's factors into a slot; None for an adapter that leaves the layer unchanged."""
        own = slice(slot * self.num_experts, (slot + 1) * self.num_experts)
        if adapter is None:
            self.factors.ranks[own].zero_()
            return
        rank = adapter.b.shape[1]
        self.factors.a[own, :, :rank].copy_(adapter.a)
        self.factors.b[own, :rank].copy_(adapter.b)
        self.factors.ranks[own].copy_(adapter.ranks)


class LoraLayers:
    """The layers of one model that adapters may change. The constructors of the layers add themselves.

    Attributes:
        groups: the tokens of the present step that have an adapter; None if none has.
        token_slots: [T] int32, the slot of each token's adapter, negative for none; None if no token has one.
        num_slots: adapters that a step may use.
    """

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups: LoraGroups | None = None
        self.token_slots: Tensor | None = None
        self.max_rank = max_rank
        self.num_slots = num_slots
        self._dtype, self._device = dtype, device
        self._layers: list[LoraLayer] = []

    def __iter__(self) -> Iterator[LoraLayer]:
        return iter(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def modules(self) -> frozenset[str]:
        """Return the names of all stored layers, those of experts that only other ranks hold included."""
        return frozenset(name for layer in self._layers for name in layer.modules)

    def add_layer(self, parts: Sequence[WeightSlice]) -> LoraLayer:
        """Add a linear layer whose weight consists of these slices."""
        return self._add([parts], None)

    def add_embedding(self, part: WeightSlice) -> LoraLayer:
        """Add an embedding.

        Args:
            part: of the transposed embedding [E, V], the columns of this rank's tokens.
        """
        return self._add([[part]], None, is_embedding=True)

    def add_experts(self, experts: Sequence[Sequence[WeightSlice]], stack: ExpertStack) -> LoraLayer:
        """Add a linear layer of a mixture.

        Args:
            experts: the slices of each expert's weight; those of all experts have the same lengths.
        """
        return self._add(experts, stack)

    def _add(
        self,
        experts: Sequence[Sequence[WeightSlice]],
        stack: ExpertStack | None,
        *,
        is_embedding: bool = False,
    ) -> LoraLayer:
        parts = experts[0]
        factors = make_factors(
            self.num_slots * len(experts),
            self.max_rank,
            parts[0].inputs[1],
            [part.outputs[1] for part in parts],
            self._dtype,
            self._device,
        )
        every = [part for own in experts for part in own]
        layer = LoraLayer(self, every, factors, len(experts), stack, is_embedding=is_embedding)
        self._layers.append(layer)
        return layer
