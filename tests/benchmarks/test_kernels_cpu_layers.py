"""What the benchmark of decode layers compares is the same work."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels_cpu_layers import Step, make_layer


def test_both_ways_give_the_same_bits() -> None:
    torch.manual_seed(0)
    layers = [make_layer() for _ in range(2)]
    if not layers[0].has_native_ops:
        pytest.skip("there are no C++ ops for such layers here")
    with torch.inference_mode():
        step = Step(layers, 2)
        one_by_one = step.one_by_one()
        assert one_by_one.isfinite().all()
        assert torch.equal(step.in_one_call(), one_by_one)
