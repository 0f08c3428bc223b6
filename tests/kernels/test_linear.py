"""Packed linear layers against float64, at every number of tokens where the implementation changes."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu
from quire.kernels import linear as module
from quire.kernels.linear import linear, pack

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NUM_TOKENS = [0, 1, 2, 3, 5, 7, 8, 9, 33, 257]


@pytest.fixture(params=["panels", "oneDNN"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "oneDNN":
        monkeypatch.setattr(module, "_panels_of", lambda packed, weight: (None, 0))
    return str(request.param)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("out_features", "in_features"), [(192, 64), (200, 96), (70, 50), (1, 1), (63, 17)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    implementation: str, out_features: int, in_features: int, dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    offset = torch.randn(out_features).to(dtype) if bias else None
    packed = pack(weight.clone())
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, in_features).to(dtype)
        exact = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
        y = linear(x, packed, offset)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_inputs_may_be_a_view_of_a_wider_tensor(implementation: str) -> None:
    weight, wide = torch.randn(128, 64), torch.randn(2, 100)
    y = linear(wide[:, 10:74], pack(weight))
    torch.testing.assert_close(y, wide[:, 10:74] @ weight.t(), atol=1e-4, rtol=1e-4)


def test_a_token_does_not_depend_on_how_many_others_there_are() -> None:
    packed = pack(torch.randn(320, 96))
    if packed.panels is None:
        pytest.skip("the packed numbers do not lie in known panels here")
    x = torch.randn(min(20, cpu.max_linear_tokens()), 96)
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    for count in range(1, len(x) + 1):
        assert torch.equal(linear(x[:count], packed), alone[:count])


def test_a_layout_other_than_expected_is_left_to_one_dnn() -> None:
    weight = torch.randn(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, module.LAYOUT_TOKENS)
    assert module._panels_of(packed, weight + 1) == (None, 0)


def test_numbers_that_are_not_finite_stay_where_they_are(implementation: str) -> None:
    packed = pack(torch.eye(64))
    x = torch.ones(2, 64)
    x[0, 3] = torch.inf
    y = linear(x, packed)
    assert y[0, 3] == torch.inf
    assert torch.equal(y[1], torch.ones(64))
