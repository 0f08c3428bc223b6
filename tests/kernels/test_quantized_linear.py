"""Linear layers with quantized weights: references against float64, kernels against references."""

from __future__ import annotations

import pytest
import torch
from random_weights import random_weight
from torch import Tensor

from quire.kernels import quantized_linear as references
from quire.kernels.quantized_linear import FLOAT4, FLOAT8, QuantizedWeight, dequantize
from quire.worker.weights.linear_weight import Float8GroupsWeight, QuantizedLinearWeight, make_linear_weight

# One rounding of the result; the interpreter truncates bfloat16, which is at most twice the error. Weights are
# rounded to the dtype of the tokens before they are multiplied.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


KINDS = ["int8", "fp8", "int8-groups", "int4", "int4-any-order", "int4-groups-of-24", "fp4"]


def by_definition(weight: QuantizedWeight) -> Tensor:
    """Compute (codes - zeros) * scales, number by number, in float64."""
    expected = torch.empty(weight.out_features, weight.in_features, dtype=torch.float64)
    num_groups = weight.scales.shape[0]
    for n in range(weight.out_features):
        for k in range(weight.in_features):
            group = k * num_groups // weight.in_features
            if weight.group_index is not None:
                group = int(weight.group_index[k])
            codes = weight.codes.view(torch.uint8) if weight.is_packed else weight.codes
            code = float(codes[n, k // 2 if weight.is_packed else k])
            if weight.is_packed:
                code = int(code) >> 4 if k % 2 else int(code) & 15
            if weight.codes.dtype == FLOAT4:
                code = e2m1(int(code))
            zero = 0 if weight.zeros is None else int(weight.zeros[group, n])
            expected[n, k] = (code - zero) * float(weight.scales[group, n])
    return expected


def e2m1(code: int) -> float:
    """Return the number of a float4 code: sign, two bits of exponent with bias 1, one bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_matches_definition(kind: str) -> None:
    weight = random_weight(kind, 5, 96)
    torch.testing.assert_close(dequantize(weight).double(), by_definition(weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "step"), [(torch.int8, 1 / 254), (FLOAT8, 2**-4)], ids=["int8", "fp8"])
def test_quantize_rounds_to_nearest(dtype: torch.dtype, step: float) -> None:
    weight = torch.randn(7, 40)
    weight[3] = 0
    error = (dequantize(references.quantize(weight, dtype)) - weight).abs()
    largest = weight.abs().amax(dim=1, keepdim=True)
    # The error of float8 is relative to each number, down to the smallest one.
    bound = largest * step if dtype == torch.int8 else (weight.abs() * step).maximum(largest * 2**-18)
    assert (error <= bound * 1.0001).all()
    assert not dequantize(references.quantize(weight, dtype))[3].any()


def test_slices_of_inputs_share_the_scales_of_the_whole() -> None:
    weight = torch.randn(6, 32)
    whole = references.quantize(weight, torch.int8)
    parts = [
        references.quantize(part, torch.int8, weight.abs().amax(dim=1)) for part in weight.split(8, dim=1)
    ]
    assert torch.equal(torch.cat([part.codes for part in parts], dim=1), whole.codes)
    assert all(torch.equal(part.scales, whole.scales) for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@DTYPES
@pytest.mark.parametrize(("num_tokens", "out_features", "in_features"), [(1, 70, 96), (17, 33, 192)], ids=str)
def test_kernel_matches_float64(
    device: str, num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, kind: str
) -> None:
    from quire.kernels.gpu.quantized_linear import quantized_linear

    weight = random_weight(kind, out_features, in_features)
    x = torch.randn(num_tokens, in_features + 3).to(dtype)[:, :in_features]
    bias = torch.randn(out_features).to(dtype) if num_tokens > 1 else None
    y = quantized_linear(x.to(device), weight.to(device), None if bias is None else bias.to(device))
    expected = x.double() @ dequantize(weight).double().t() + (0 if bias is None else bias.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_kernel_supports_no_tokens(device: str) -> None:
    from quire.kernels.gpu.quantized_linear import quantized_linear

    weight = random_weight("int4", 64, 64).to(device)
    assert quantized_linear(torch.zeros(0, 64, device=device), weight).shape == (0, 64)


@DTYPES
def test_quantize_tokens_matches_twin(device: str, dtype: torch.dtype) -> None:
    from quire.kernels.gpu.quantize_tokens import quantize_tokens

    x = (100 * torch.randn(5, 77)).to(dtype)
    x[2] = 0
    codes, scales = quantize_tokens(x.to(device))
    expected_codes, expected_scales = references.quantize_tokens(x)
    assert torch.equal(scales.cpu(), expected_scales)
    actual, expected = codes.cpu().float(), expected_codes.float()
    if device == "cpu":
        # The interpreter loses the carry of numbers that round up to a power of two.
        carried = (expected.frexp().mantissa.abs() == 0.5) & (actual != expected)
        actual = actual.where(~carried, expected)
        assert carried.float().mean() < 0.05
    # Numbers half-way between two float8 numbers may round either way.
    assert (actual == expected).float().mean() > 0.95
    torch.testing.assert_close(actual, expected, rtol=2**-3, atol=2**-9)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_float8_linear_is_close_to_float64(device: str, dtype: torch.dtype, has_bias: bool) -> None:
    weight = random_weight("fp8", 64, 96).to(device)
    if device == "cuda" and not references.supports_float8_linear(weight):
        pytest.skip("this GPU does not multiply float8")
    x, bias = torch.randn(9, 96).to(device, dtype), torch.randn(64).to(device, dtype)
    y = references.float8_linear(x, weight, bias if has_bias else None)
    expected = x.cpu().double() @ dequantize(weight.to("cpu")).double().t()
    expected += bias.cpu().double() if has_bias else 0
    assert y.dtype == dtype
    # The numbers of a token are off by at most 2^-4. Errors cancel in sums of products of random tokens.
    torch.testing.assert_close(y.cpu().double(), expected, atol=0.15, rtol=2**-4)
    assert (y.cpu().double() - expected).abs().mean() < 0.04


def test_cpu_does_not_support_float8_linear() -> None:
    assert not references.supports_float8_linear(random_weight("fp8", 64, 64))


GROUPS = pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features"), [(1, 70, 384), (17, 33, 256), (70, 200, 128)], ids=str
)


def random_groups(out_features: int, in_features: int) -> QuantizedWeight:
    codes = torch.randn(out_features, in_features).to(FLOAT8)
    return QuantizedWeight(codes, (torch.rand(in_features // 128, out_features) + 0.5) * in_features**-0.5)


@GROUPS
@DTYPES
def test_float8_groups_kernel_matches_twin(
    device: str, num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    from quire.kernels.gpu.float8_groups import float8_groups_linear

    weight = random_groups(out_features, in_features)
    x = torch.randn(num_tokens, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if num_tokens > 1 else None
    y = float8_groups_linear(x.to(device), weight.to(device), None if bias is None else bias.to(device))
    expected = references.float8_groups_linear(x, weight, bias)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.cpu().float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_float8_groups_scale_each_group_of_a_token() -> None:
    """A group of large numbers takes no bits from the others."""
    weight, x = random_groups(64, 256), torch.randn(5, 256)
    x[:, :128] *= 1e4
    weight.codes.view(torch.uint8)[:, :128] = 0
    y = references.float8_groups_linear(x, weight)
    expected = x.double() @ dequantize(weight).double().t()
    torch.testing.assert_close(y.double(), expected, atol=0.1, rtol=2**-4)


def test_float8_groups_are_multiplied_on_hopper_in_16_bit_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "has_kernels", lambda tensor: True)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    weight = random_groups(32, 256)
    assert isinstance(make_linear_weight(weight, torch.bfloat16), Float8GroupsWeight)
    assert type(make_linear_weight(weight, torch.float32)) is QuantizedLinearWeight
    halves = QuantizedWeight(weight.codes, weight.scales.repeat_interleave(2, dim=0))
    assert type(make_linear_weight(halves, torch.bfloat16)) is QuantizedLinearWeight
    capability[0] = (8, 9)
    assert type(make_linear_weight(weight, torch.bfloat16)) is QuantizedLinearWeight
