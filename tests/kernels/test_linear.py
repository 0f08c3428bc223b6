"""Packed linear layers against float64, at numbers of tokens around each change of implementation."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch

from quire.kernels import linear as module
from quire.kernels.linear import Layout, PackedWeight, embed, linear, pack, pack_int8
from quire.kernels.native.library import is_available
from quire.kernels.native.panels import panel_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NUM_TOKENS = [0, 1, 2, 3, 5, 7, 8, 9, 33, 257]


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


@pytest.fixture(params=["panels", "oneDNN", "panels alone"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the products in use: ours and oneDNN's, or one of them only."""
    if request.param == "oneDNN":
        monkeypatch.setattr(module, "_panels_of", lambda packed, weight: None)
    if request.param == "panels alone":
        monkeypatch.setattr(module, "_can_pack", lambda weight: False)
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


def test_linear_supports_strided_input(implementation: str) -> None:
    weight, wide = torch.randn(128, 64), torch.randn(2, 100)
    y = linear(wide[:, 10:74], pack(weight))
    torch.testing.assert_close(y, wide[:, 10:74] @ weight.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_of_a_token_does_not_depend_on_batch_size(dtype: torch.dtype) -> None:
    packed = pack(torch.randn(320, 96).to(dtype))
    panels = packed.panels
    if panels is None:
        pytest.skip("the packed layout is unknown on this machine")
    x = torch.randn(20, 96).to(dtype)
    alone = torch.cat([panel_linear(row, panels, None) for row in x.split(1)])
    for count in range(1, len(x) + 1):
        assert torch.equal(panel_linear(x[:count], panels, None), alone[:count])


def test_unknown_layout_has_no_panels() -> None:
    weight = torch.randn(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, module.LAYOUT_TOKENS)
    assert module._panels_of(packed, weight + 1) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 33, 300])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embed_reads_packed_weight(dtype: torch.dtype, implementation: str) -> None:
    weight, ids = torch.randn(200, 96).to(dtype), torch.tensor([0, 199, 64, 63, 64] * 50, dtype=torch.int32)
    packed = pack(weight.clone())
    if packed.can_embed:
        assert torch.equal(embed(ids, packed, dtype), weight[ids.long()])
    else:
        assert packed.layout is Layout.ONE_DNN
    assert torch.equal(embed(ids, PackedWeight(weight), dtype), weight[ids.long()])


@pytest.mark.skipif(not collapses_pages(), reason="this system does not collapse huge pages on request")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_packed_weights_use_huge_pages(dtype: torch.dtype) -> None:
    weight = torch.zeros(16 << 10, 1 << 10, dtype=dtype)
    before = huge_page_bytes()
    packed = pack_int8(weight, torch.ones(len(weight))) if dtype == torch.int8 else pack(weight)
    if packed is None or packed.layout is Layout.PLAIN:
        pytest.skip("weights are not packed on this machine")
    assert huge_page_bytes() - before > weight.nbytes / 2


def test_infinite_input_affects_only_its_token(implementation: str) -> None:
    packed = pack(torch.eye(64))
    x = torch.ones(2, 64)
    x[0, 3] = torch.inf
    y = linear(x, packed)
    assert y[0, 3] == torch.inf
    assert torch.equal(y[1], torch.ones(64))
