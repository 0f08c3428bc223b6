"""Packed linear layers against float64, at numbers of tokens around each change of the computation."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch

from quire.kernels import linear as module
from quire.kernels.activation import GATED_ACTIVATIONS
from quire.kernels.linear import (
    Layout,
    PackedWeight,
    embed,
    gated_linear,
    linear,
    linear_heads,
    narrow,
    pack,
    pack_heads,
    pack_int8,
)
from quire.kernels.native.library import is_available

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# Tiles of 6 or 8 tokens, alone and packed; chunks of 240.
NUM_TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 241, 257]


def collapses_pages() -> bool:
    """Return whether the system collapses written memory to huge pages: Linux 6.1 or later, unless disabled."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    version = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
    return is_available() and setting.exists() and "[never]" not in setting.read_text() and version >= [6, 1]


def huge_page_bytes() -> int:
    """Return the bytes of this process on huge pages."""
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture(params=Layout, ids=lambda layout: layout.name)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Select the best layout that `pack` may choose."""
    if request.param is not Layout.PACKED:
        monkeypatch.setattr(module, "_supports_packing", lambda weight: False)
    if request.param is Layout.PLAIN:
        monkeypatch.setattr(module, "_supports_one_dnn", lambda weight: False)
    return Layout(request.param)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(192, 64), (200, 96), (70, 50), (1, 1), (63, 17), (24, 516)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(layout: Layout, out_features: int, in_features: int, dtype: torch.dtype, bias: bool) -> None:
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


@pytest.mark.parametrize("gate", GATED_ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("out_features", "weight_dtype"), [(256, None), (256, torch.int8), (200, None)], ids=str
)
def test_gated_linear_has_the_bits_of_both_ops(
    out_features: int, weight_dtype: torch.dtype | None, dtype: torch.dtype, gate: str
) -> None:
    torch.manual_seed(0)
    if weight_dtype is None:
        packed = pack((torch.randn(out_features, 516) / 22).to(dtype))
    else:
        quantized = pack_int8(
            torch.randint(-127, 128, (out_features, 516), dtype=weight_dtype), torch.rand(out_features) / 1000
        )
        if quantized is None:
            pytest.skip("there is no C++ compiler")
        packed = quantized
    bias = torch.randn(out_features).to(dtype)
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, 516).to(dtype)
        for offset in (None, bias):
            expected = GATED_ACTIVATIONS[gate](linear(x, packed, offset))
            assert torch.equal(gated_linear(x, packed, gate, offset), expected)


def test_linear_supports_strided_input(layout: Layout) -> None:
    weight, wide = torch.randn(128, 64), torch.randn(2, 100)
    y = linear(wide[:, 10:74], pack(weight))
    torch.testing.assert_close(y, wide[:, 10:74] @ weight.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_features", [516, 515])
def test_result_of_a_token_does_not_depend_on_batch_size(dtype: torch.dtype, in_features: int) -> None:
    if not is_available():
        pytest.skip("there is no C++ compiler")
    packed = pack(torch.randn(330, in_features).to(dtype))
    x = torch.randn(300, in_features).to(dtype)
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    for count in (*range(1, 21), 240, 241, 300):
        assert torch.equal(linear(x[:count], packed), alone[:count])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(70, 48), (33, 17)])
def test_linear_of_heads(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(3, out_features, in_features) / in_features**0.5).to(dtype)
    packed = pack_heads(weight.clone())
    x = torch.randn(40, 5, in_features).to(dtype)[:, 1:4]
    y = linear_heads(x, packed)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    torch.testing.assert_close(y.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    part = packed.part(slice(1, 3))
    assert torch.equal(linear_heads(x[:, 1:], part), y[:, 1:]) == is_available()
    shared = x[:, :1].expand(-1, 3, -1)
    torch.testing.assert_close(linear_heads(shared, packed), linear_heads(shared.contiguous(), packed))
    if is_available():
        for count in (1, 2, 9, 33):
            assert torch.equal(linear_heads(x[:count], packed), y[:count])


def test_int8_result_of_a_token_does_not_depend_on_batch_size() -> None:
    packed = pack_int8(torch.randint(-128, 128, (90, 516), dtype=torch.int8), torch.rand(90))
    if packed is None:
        pytest.skip("there is no C++ compiler")
    x = torch.randn(20, 516)
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    for count in range(1, 21):
        assert torch.equal(linear(x[:count], packed), alone[:count])


@pytest.mark.parametrize("num_tokens", [1, 4, 20, 33, 300])
def test_narrowed_weight_multiplies_float32_tokens(num_tokens: int) -> None:
    weight, bias, x = torch.randn(150, 96), torch.randn(150), torch.randn(num_tokens, 96)
    narrowed = narrow(pack(weight.clone()))
    if narrowed.matrix is None:
        pytest.skip("there is no C++ compiler")
    assert narrowed.matrix.dtype == torch.bfloat16
    exact = x.double() @ weight.bfloat16().double().t() + bias.double()
    y = linear(x, narrowed, bias)
    assert y.dtype == torch.float32
    # The tokens are rounded to 8 bits on processors that multiply bfloat16 numbers.
    torch.testing.assert_close(y.double(), exact, atol=0.2, rtol=0)
    if num_tokens > 1:
        assert torch.equal(linear(x[:1], narrowed, bias), y[:1])


@pytest.mark.parametrize("num_tokens", [1, 4, 20, 33])
def test_gated_narrowed_weight_has_the_bits_of_both_ops(num_tokens: int) -> None:
    bias, x = torch.randn(256), torch.randn(num_tokens, 96)
    narrowed = narrow(pack(torch.randn(256, 96)))
    if narrowed.matrix is None:
        pytest.skip("there is no C++ compiler")
    expected = GATED_ACTIVATIONS["silu"](linear(x, narrowed, bias))
    assert torch.equal(gated_linear(x, narrowed, "silu", bias), expected)


def test_narrow_keeps_other_weights() -> None:
    weight = pack(torch.randn(150, 96).bfloat16())
    assert narrow(weight) is weight


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 20, 33, 300])
def test_int8(num_tokens: int, dtype: torch.dtype) -> None:
    codes = torch.randint(-128, 128, (150, 96), dtype=torch.int8)
    scales, bias = torch.rand(150) / 100, torch.randn(150).to(dtype)
    packed = pack_int8(codes, scales)
    if packed is None:
        pytest.skip("there is no C++ compiler")
    x = torch.randn(num_tokens, 96).to(dtype)
    exact = x.double() @ (codes.double() * scales.double().unsqueeze(1)).t() + bias.double()
    y = linear(x, packed, bias)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_embed_reads_packed_weight(dtype: torch.dtype, layout: Layout) -> None:
    weight, ids = torch.randn(200, 96).to(dtype), torch.tensor([0, 199, 64, 63, 64] * 50, dtype=torch.int32)
    packed = pack(weight.clone())
    assert packed.can_embed == (packed.layout is not Layout.ONE_DNN)
    if packed.can_embed:
        assert torch.equal(embed(ids, packed, dtype), weight[ids.long()])
    assert torch.equal(embed(ids, PackedWeight(weight), dtype), weight[ids.long()])


@pytest.mark.skipif(not collapses_pages(), reason="this system does not collapse huge pages on request")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("count", [1, 40])
def test_packed_weights_use_huge_pages(dtype: torch.dtype, count: int) -> None:
    """One weight of 64 MiB, and weights smaller than a huge page."""
    weight = torch.zeros((64 << 10) // dtype.itemsize // count, 1 << 10, dtype=dtype)
    before = huge_page_bytes()
    packed = [
        pack_int8(weight, torch.ones(len(weight))) if dtype == torch.int8 else pack(weight)
        for _ in range(count)
    ]
    if packed[0] is None or packed[0].layout is Layout.PLAIN:
        pytest.skip("weights are not packed on this machine")
    assert huge_page_bytes() - before > 0.8 * count * weight.nbytes


def test_infinite_input_affects_only_its_token(layout: Layout) -> None:
    packed = pack(torch.eye(64))
    x = torch.ones(2, 64)
    x[0, 3] = torch.inf
    y = linear(x, packed)
    assert y[0, 3] == torch.inf
    assert torch.equal(y[1], torch.ones(64))
