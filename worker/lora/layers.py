"""LoraLayers: the linear layers of a model that adapters may change, and their slots on the device.

Tensor parallelism needs no collectives of its own. A column-parallel layer has all of A and its outputs' part of B. A
row-parallel layer has its inputs' part of A and all of B: the ranks' products add up in the layer's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.lora import LoraFactors, LoraGroups, add_lora, make_factors
from ...proto.errors import ConfigError
from ...proto.model.target_modules import TargetModules
from ..weights.weight_slice import WeightSlice
from .step_adapters import NO_ADAPTERS, LayerTokens

ALL_MODULES = TargetModules()


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
        tokens: the layer's inputs.
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
        tokens: LayerTokens = LayerTokens.ALL,
    ) -> None:
        self._model = model
        self.parts = tuple(parts)
        self.factors = factors
        self.num_experts = num_experts
        self.stack = stack
        self.is_embedding = is_embedding
        self.tokens = tokens

    @property
    def modules(self) -> Iterator[str]:
        """Yield the names of the stored layers, those of experts that only other ranks hold included."""
        yield from _names_of(self.parts[: len(self.parts) // self.num_experts], self.stack)

    @property
    def stacked_shape(self) -> tuple[int, int]:
        """Return the outputs and inputs of one expert's matrix, with the outputs of all parts."""
        parts = self.parts[: len(self.parts) // self.num_experts]
        return sum(part.shape[0] for part in parts), parts[0].shape[1]

    @property
    def is_active(self) -> bool:
        """Return whether tokens of the present step have adapters."""
        return self._groups is not None

    @property
    def _groups(self) -> LoraGroups | None:
        return self._model.step.groups_of(self.tokens)

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters' outputs for the layer's tokens to its own, in place.

        Args:
            y: [T, N].
            x: [T, K].
        """
        self.add_rows(y, x, self._groups)

    def add_rows(self, y: Tensor, x: Tensor, groups: LoraGroups | None) -> None:
        """As `add`, for the rows of `groups`, whose slots are rows of `factors`; None for no rows."""
        if groups is not None:
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


class UnchangedLayer:
    """Stands in for the LoraLayer of a layer that adapters may not change."""

    is_active = False
    factors = None

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add nothing."""

    def add_rows(self, y: Tensor, x: Tensor, groups: LoraGroups | None) -> None:
        """Add nothing."""


UNCHANGED = UnchangedLayer()
Adapted = LoraLayer | UnchangedLayer


def _names_of(parts: Sequence[WeightSlice], stack: ExpertStack | None) -> Iterator[str]:
    """Yield the names of the stored layers that a layer consists of.

    Args:
        parts: of an ordinary layer, or of the first expert that a rank has.
    """
    if stack is None:
        yield from (part.name for part in parts)
        return
    own = f"{stack.module}.{stack.first}."
    for part in parts:
        name = part.name.removeprefix(own)
        yield from (f"{stack.module}.{index}.{name}" for index in range(stack.num_experts))


class LoraLayers:
    """The layers of one model that adapters may change. The constructors of the layers add themselves.

    Attributes:
        step: the adapters of the present step.
        num_slots: adapters that a step may use; 0 without LoRA, when no layer is added.
        targets: the modules that adapters may change.
        num_other_bytes: memory of the slots beside the layers' factors.
        is_elsewhere: whether a module is one of another pipeline stage.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        targets: TargetModules = ALL_MODULES,
    ) -> None:
        self.step = NO_ADAPTERS
        self.max_rank = max_rank
        self.num_slots = num_slots
        self.targets = targets
        self.num_other_bytes = 0
        self.is_elsewhere: Callable[[str], bool] = lambda module: False
        self._dtype, self._device = dtype, device
        self._layers: list[LoraLayer] = []
        self._found_targets: set[str] = set()

    def __iter__(self) -> Iterator[LoraLayer]:
        return iter(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def modules(self) -> frozenset[str]:
        """Return the names of the stored layers that adapters may change, those of other ranks' experts included."""
        return frozenset(
            name
            for layer in self._layers
            for name in layer.modules
            if self.targets.has(name) or (layer.stack is not None and self.targets.has(layer.stack.parameter))
        )

    @property
    def slot_bytes(self) -> int:
        """Return the memory of one slot."""
        num_bytes = sum(layer.factors.num_bytes for layer in self._layers)
        return (num_bytes + self.num_other_bytes) // self.num_slots

    @property
    def summary(self) -> str:
        """Return the memory of the slots, for the log at the start of a rank."""
        return (
            f"{self.num_slots} x {self.slot_bytes / 2**20:,.1f} MiB, for adapters of rank {self.max_rank} of "
            f"{len(self._layers)} layers"
        )

    @property
    def found_targets(self) -> list[bool]:
        """Return whether each target is a module of the layers that were added."""
        return [target in self._found_targets for target in self.targets.names]

    def check_targets(self, has_each: Sequence[bool] | None = None) -> None:
        """Check that the model, all of whose layers were added, has each target.

        Args:
            has_each: `found_targets` of all pipeline stages; None for those of this one.

        Raises:
            ConfigError: it lacks one; names it.
        """
        missing = sorted(
            target
            for target, has_it in zip(self.targets.names, has_each or self.found_targets, strict=True)
            if not has_it
        )
        if missing:
            raise ConfigError(
                f"lora_target_modules has {', '.join(missing)}, which is no module of this model that can be adapted"
            )

    def set_elsewhere(self, is_elsewhere: Callable[[str], bool]) -> None:
        """Set which tensors other pipeline stages read, by their names."""
        if self.num_slots:
            self.is_elsewhere = lambda module: is_elsewhere(f"{module}.")

    def add_layer(self, parts: Sequence[WeightSlice], tokens: LayerTokens = LayerTokens.ALL) -> Adapted:
        """Add a linear layer whose weight consists of these slices, unless adapters may not change it."""
        return self._add([parts], None, tokens=tokens)

    def add_embedding(self, part: WeightSlice) -> Adapted:
        """Add an embedding, unless adapters may not change it.

        Args:
            part: of the transposed embedding [E, V], the columns of this rank's tokens.
        """
        return self._add([[part]], None, is_embedding=True)

    def add_experts(self, experts: Sequence[Sequence[WeightSlice]], stack: ExpertStack) -> Adapted:
        """Add a linear layer of a mixture, unless adapters may not change it.

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
        tokens: LayerTokens = LayerTokens.ALL,
    ) -> Adapted:
        if not self.num_slots:
            return UNCHANGED
        parts = experts[0]
        names = [*_names_of(parts, stack), *([] if stack is None else [stack.parameter])]
        found = frozenset[str]().union(*map(self.targets.found_in, names))
        self._found_targets |= found
        if self.targets.names and not found:
            return UNCHANGED
        factors = make_factors(
            self.num_slots * len(experts),
            self.max_rank,
            parts[0].inputs[1],
            [part.outputs[1] for part in parts],
            self._dtype,
            self._device,
        )
        every = [part for own in experts for part in own]
        layer = LoraLayer(self, every, factors, len(experts), stack, is_embedding=is_embedding, tokens=tokens)
        self._layers.append(layer)
        return layer


NO_LORA = LoraLayers(0, 0, torch.float32, torch.device("cpu"))
