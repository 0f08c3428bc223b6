"""Experts one by one and all at once compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import GatedActivation
from quire.kernels.linear import PackedWeight
from quire.worker.lora.expert_adapters import ExpertAdapters
from quire.worker.lora.layers import ExpertStack, LoraLayer, LoraLayers, PartFactors
from quire.worker.models.layers import ScaledNorm
from quire.worker.models.moe.expert_layers import AdaptedExperts, ExpertLayers
from quire.worker.models.moe.moe import group_experts
from quire.worker.weights.linear_weight import LinearWeight, PlainWeight, packed_weight
from quire.worker.weights.weight_slice import WeightSlice


def random_norm(size: int) -> ScaledNorm:
    factors = 1 + torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.2
    return ScaledNorm(factors, torch.ones(size), 1e-6)


@pytest.mark.parametrize(("scaled_inputs", "norm"), [(False, None), (True, None), (False, random_norm(24))])
def test_grouped_experts_equal_experts_one_by_one(scaled_inputs: bool, norm: ScaledNorm | None) -> None:
    count, hidden, inner = 5, 24, 16
    layers = ExpertLayers(
        [PlainWeight(PackedWeight(torch.randn(2 * inner, hidden))) for _ in range(count)],
        [PlainWeight(PackedWeight(torch.randn(hidden, inner))) for _ in range(count)],
        GatedActivation("silu"),
        count,
        scaled_inputs=scaled_inputs,
        norm=norm,
    )
    grouped = group_experts(layers)
    assert grouped is not None
    x, factors = torch.randn(7, hidden), torch.rand(7, 2)
    expert_ids = torch.randn(7, count).topk(2).indices
    expected = layers.forward(x, factors, expert_ids)
    torch.testing.assert_close(grouped.forward(x, factors, expert_ids), expected, atol=1e-3, rtol=1e-4)
    changed: dict[str, Any] = {"scaled_inputs": not scaled_inputs} if norm is None else {"norm": None}
    other = replace(layers, **changed).forward(x, factors, expert_ids)
    assert not torch.allclose(expected, other)


def make_adapted(count: int, hidden: int, inner: int) -> tuple[ExpertLayers, ExpertAdapters]:
    """Return experts, and adapters of them in two slots, the second of which changes every other expert."""
    lora = LoraLayers(2, 4, torch.float32, torch.device("cpu"))
    layers = []
    for name, parts in (
        ("gate_up_proj", [("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden))]),
        ("down_proj", [("down_proj", (hidden, inner))]),
    ):
        slices = [
            [WeightSlice(f"mlp.experts.{index}.{part}", shape, 0, 0, shape[0]) for part, shape in parts]
            for index in range(count)
        ]
        layer = lora.add_experts(slices, ExpertStack("mlp.experts", name, count))
        assert isinstance(layer, LoraLayer)
        for slot in range(2):
            own = [
                None
                if slot and index % 2
                else PartFactors(torch.randn(3 + slot, part.shape[1]), torch.randn(3 + slot, part.shape[0]))
                for index, part in enumerate(layer.parts)
            ]
            layer.put(slot, layer.pack(own))
        layers.append(layer)
    experts = ExpertLayers(
        [PlainWeight(PackedWeight(torch.randn(2 * inner, hidden))) for _ in range(count)],
        [PlainWeight(PackedWeight(torch.randn(hidden, inner))) for _ in range(count)],
        GatedActivation("silu"),
        count,
    )
    return experts, ExpertAdapters(lora, layers[0], layers[1], count)


def plain_weight(weight: LinearWeight) -> Tensor:
    packed = packed_weight(weight)
    assert packed is not None
    return packed.weight


def merged(layers: ExpertLayers, adapters: ExpertAdapters, slot: int) -> ExpertLayers:
    """Return the experts with the adapter of a slot added to their weights."""
    weights = []
    for own, layer in ((layers.gate_up, adapters.gate_up), (layers.down, adapters.down)):
        assert isinstance(layer, LoraLayer)
        factors, count = layer.factors, layer.num_experts
        updates = []
        for expert in range(count):
            row = slot * count + expert
            parts = [
                factors.b[row, :rank, first:last].T @ factors.a[row, part, :rank]
                for part, (rank, first, last) in enumerate(
                    zip(factors.ranks[row].tolist(), factors.bounds, factors.bounds[1:], strict=False)
                )
            ]
            updates.append(torch.cat(parts))
        weights.append(
            [
                PlainWeight(PackedWeight(plain_weight(weight) + update))
                for weight, update in zip(own, updates, strict=True)
            ]
        )
    return replace(layers, gate_up=weights[0], down=weights[1])


@pytest.mark.parametrize(("scaled_inputs", "norm"), [(False, None), (True, None), (False, random_norm(24))])
def test_experts_with_adapters_equal_merged_experts(scaled_inputs: bool, norm: ScaledNorm | None) -> None:
    """One by one and all at once; tokens of two adapters and of none are in one step."""
    layers, adapters = make_adapted(5, 24, 16)
    layers = replace(layers, scaled_inputs=scaled_inputs, norm=norm)
    x, factors = torch.randn(23, 24), torch.rand(23, 2)
    expert_ids = torch.randn(23, 5).topk(2).indices
    alone = layers.forward(x, factors, expert_ids)
    slots = torch.randint(-1, 2, (23,), dtype=torch.int32)
    grouped = group_experts(layers, adapters)
    assert grouped is not None
    found = AdaptedExperts(layers, adapters, layers).forward(x, factors, expert_ids, slots)
    for slot, experts in enumerate(merged(layers, adapters, slot) for slot in range(2)):
        expected = experts.forward(x, factors, expert_ids)[slots == slot]
        assert not torch.allclose(expected, alone[slots == slot], rtol=0.1)
        torch.testing.assert_close(found[slots == slot], expected, atol=1e-2, rtol=1e-3)
    none = slots < 0
    assert torch.equal(found[none], layers.forward(x[none], factors[none], expert_ids[none]))
    torch.testing.assert_close(grouped.forward(x, factors, expert_ids, slots), found, atol=1e-2, rtol=1e-3)
