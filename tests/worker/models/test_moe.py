"""Experts one by one and all at once compute the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.activation import GatedActivation
from quire.kernels.linear import PackedWeight
from quire.worker.models.moe import ExpertLayers, group_experts
from quire.worker.weights.linear_weight import PlainWeight


@pytest.mark.parametrize("scaled_inputs", [False, True])
def test_grouped_experts_equal_experts_one_by_one(scaled_inputs: bool) -> None:
    count, hidden, inner = 5, 24, 16
    layers = ExpertLayers(
        [PlainWeight(PackedWeight(torch.randn(2 * inner, hidden))) for _ in range(count)],
        [PlainWeight(PackedWeight(torch.randn(hidden, inner))) for _ in range(count)],
        GatedActivation("silu"),
        count,
        scaled_inputs=scaled_inputs,
    )
    grouped = group_experts(layers)
    assert grouped is not None
    x, factors = torch.randn(7, hidden), torch.rand(7, 2)
    expert_ids = torch.randn(7, count).topk(2).indices
    expected = layers.forward(x, factors, expert_ids)
    torch.testing.assert_close(grouped.forward(x, factors, expert_ids), expected, atol=1e-3, rtol=1e-4)
    other = replace(layers, scaled_inputs=not scaled_inputs).forward(x, factors, expert_ids)
    assert not torch.allclose(expected, other)
