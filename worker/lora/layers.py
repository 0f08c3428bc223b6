"""LoraLayers: the linear layers of a model that adapters may change, and their slots on the device.

Tensor parallelism needs no collectives of its own. A column-parallel layer has all of A and its outputs' part of B. A
row-parallel layer has its inputs' part of A and all of B: the ranks' products add up in the layer's all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class LoraLayer:
    """The adapters of one linear layer.

    Args:
        parts: the layer's projections, as this rank stores them.

    Attributes:
        factors: of all slots.
    """

    def __init__(self, model: LoraLayers, parts: Sequence[WeightSlice], factors: LoraFactors) -> None:
        self._model = model
        self.parts = tuple(parts)
        self.factors = factors

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
            add_lora(y, x.contiguous(), self.factors, self._model.groups)

    def put(self, slot: int, adapter: Sequence[PartFactors | None]) -> None:
        """Copy an adapter's factors for this layer into a slot; None for a part that it leaves unchanged."""
        factors = self.factors
        ranks = [0 if part is None else len(part.a) for part in adapter]
        for index, part in enumerate(adapter):
            if part is not None:
                first, last = factors.bounds[index : index + 2]
                factors.a[slot, index, : ranks[index]].copy_(part.a)
                factors.b[slot, : ranks[index], first:last].copy_(part.b)
        factors.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32))


class LoraLayers:
    """The layers of one model that adapters may change. The constructors of the layers add themselves.

    Attributes:
        groups: the tokens of the present step that have an adapter; None if none has.
    """

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups: LoraGroups | None = None
        self.max_rank = max_rank
        self._num_slots = num_slots
        self._dtype, self._device = dtype, device
        self._layers: list[LoraLayer] = []

    def __iter__(self) -> Iterator[LoraLayer]:
        return iter(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return the stored layers by name: outputs and inputs."""
        return {part.name: part.shape for layer in self._layers for part in layer.parts}

    def add_layer(self, parts: Sequence[WeightSlice]) -> LoraLayer:
        """Add a linear layer whose weight consists of these slices."""
        factors = make_factors(
            self._num_slots,
            self.max_rank,
            parts[0].inputs[1],
            [part.outputs[1] for part in parts],
            self._dtype,
            self._device,
        )
        layer = LoraLayer(self, parts, factors)
        self._layers.append(layer)
        return layer
