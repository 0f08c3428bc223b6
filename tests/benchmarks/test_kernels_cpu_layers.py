"""The variants that the decode-layer benchmark compares compute the same result."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels_cpu_layers import Step, make_layer


def test_decode_in_one_call_equals_op_by_op_to_the_bit() -> None:
    torch.manual_seed(0)
    layers = [make_layer() for _ in range(2)]
    if layers[0].missing_op() is not None:
        pytest.skip("this build has no C++ ops for such layers")
    with torch.inference_mode():
        step = Step(layers, 2)
        one_by_one = step.one_by_one()
        assert one_by_one.isfinite().all()
        assert torch.equal(step.in_one_call(), one_by_one)
