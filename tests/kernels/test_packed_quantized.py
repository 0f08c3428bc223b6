"""Packed quantized weights, against the same weights dequantized by PyTorch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.activation import GatedActivation
from quire.kernels.linear import pack
from quire.kernels.packed_experts import PackedExperts, supports
from quire.kernels.packed_quantized import PackedQuantized, dequantize_packed, pack_quantized
from quire.kernels.quantized_linear import FLOAT4, FLOAT8, QuantizedWeight, dequantize

pytestmark = pytest.mark.usefixtures("two_threads")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ("mxfp4", "nvfp4", "float8", "int4", "int4-zeros")
NUM_EXPERTS, PER_TOKEN = 5, 2


def random_weight(form: str, rows: int, columns: int, group_len: int) -> QuantizedWeight:
    """Return a weight [rows, columns] of one of FORMATS with all of its codes."""
    groups = columns // group_len, rows
    if form == "float8":
        return QuantizedWeight((20 * torch.randn(rows, columns)).to(FLOAT8), torch.rand(groups) / 200)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    if form == "mxfp4":
        return QuantizedWeight(codes.view(FLOAT4), torch.randint(-6, 0, groups).float().exp2().bfloat16())
    if form == "nvfp4":
        return QuantizedWeight(codes.view(FLOAT4), torch.rand(groups) / 10)
    zeros = torch.randint(0, 17, groups) if form == "int4-zeros" else torch.full(groups, 8)
    return QuantizedWeight(codes, (torch.rand(groups) / 30).half(), zeros.to(torch.int16))


def packed(weight: QuantizedWeight) -> PackedQuantized:
    matrix = pack_quantized(weight)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "group_len"), [(70, 96, 32), (3, 48, 16), (128, 24, 24)])
@pytest.mark.parametrize("form", FORMATS)
def test_dequantized_codes_are_the_packed_weight(
    form: str, rows: int, columns: int, group_len: int, dtype: torch.dtype
) -> None:
    weight = random_weight(form, rows, columns, group_len)
    found = dequantize_packed(packed(weight), dtype)
    assert torch.equal(found.weight.flatten(), pack(dequantize(weight).to(dtype)).weight.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_experts_multiply_as_dequantized_ones(form: str, dtype: torch.dtype) -> None:
    gate_up, down = (
        [packed(random_weight(form, *shape, 16)) for _ in range(NUM_EXPERTS)]
        for shape in ((96, 80), (80, 48))
    )
    biases = torch.randn(NUM_EXPERTS, 96).to(dtype), torch.randn(NUM_EXPERTS, 80).to(dtype)
    activation = GatedActivation("silu")
    quantized = PackedExperts(gate_up, down, activation, *biases, dtype=dtype)
    dequantized = PackedExperts(
        [dequantize_packed(weight, dtype) for weight in gate_up],
        [dequantize_packed(weight, dtype) for weight in down],
        activation,
        *biases,
    )
    # One to 4 rows per expert are multiplied in registers, more by whole panels.
    for num_tokens in (1, 2, 5, 7, 9, 60):
        x = torch.randn(num_tokens, 80).to(dtype)
        ids = torch.rand(num_tokens, NUM_EXPERTS).argsort(dim=1)[:, :PER_TOKEN].contiguous()
        factors = torch.rand(num_tokens, PER_TOKEN)
        expected = dequantized.forward(x, factors, ids)
        assert expected.any()
        assert torch.equal(quantized.forward(x, factors, ids), expected)


@pytest.mark.parametrize(("form", "bits"), [("mxfp4", 4.25), ("float8", 9.0), ("int4", 5.0)])
def test_bytes_are_those_of_codes_and_scales(form: str, bits: float) -> None:
    weight = packed(random_weight(form, 128, 64, 32))
    assert weight.nbytes * 8 == 128 * 64 * bits


def test_powers_of_two_beyond_the_exponents_are_kept_as_numbers() -> None:
    weight = random_weight("mxfp4", 64, 32, 32)
    scales = weight.scales.clone()
    scales[0, 5] = 2.0**-126
    weight = QuantizedWeight(weight.codes, scales)
    assert packed(weight).scales.dtype == torch.float32
    found = dequantize_packed(packed(weight), torch.float32)
    assert torch.equal(found.weight.flatten(), pack(dequantize(weight)).weight.flatten())


def test_groups_that_split_words_are_not_packed() -> None:
    weight = random_weight("int4", 64, 32, 4)
    assert pack_quantized(weight) is None
    whole = random_weight("int4", 64, 32, 32)
    assert (
        pack_quantized(QuantizedWeight(whole.codes, whole.scales, whole.zeros, torch.zeros(32).int())) is None
    )
    assert pack_quantized(QuantizedWeight(torch.ones(64, 32, dtype=torch.int8), torch.ones(1, 64))) is None


def test_experts_of_several_formats_are_not_supported() -> None:
    one, other = packed(random_weight("int4", 64, 32, 32)), packed(random_weight("float8", 64, 32, 32))
    assert supports([one, one])
    assert not supports([one, other])
    assert not supports([one, pack(torch.randn(64, 32))])
