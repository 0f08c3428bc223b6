"""Quantized keys and values: their error at every magnitude, and the slots that are written."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.native import ops as cpu
from quire.kernels.native.library import is_available
from quire.kernels.paged_cache import write_kv
from quire.kernels.quantized_kv import LIMITS, dequantize, quantize

# Error relative to the largest magnitude of a vector: half a step of int8, and of float8's largest binade.
ERROR = {torch.int8: 0.51 / 127, torch.float8_e4m3fn: 16.1 / 448}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


@pytest.fixture(params=["native", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        monkeypatch.setattr(cpu, "supports", lambda x, length=0: False)
    elif not is_available():
        pytest.skip("there is no C++ compiler")


@DTYPES
@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e4])
def test_dequantized_numbers_are_close(dtype: torch.dtype, magnitude: float) -> None:
    torch.manual_seed(0)
    x = magnitude * torch.randn(50, 64)
    numbers, scales = quantize(x, dtype)
    error = (dequantize(numbers, scales, torch.float64) - x.double()).abs()
    assert (error <= ERROR[dtype] * x.abs().amax(dim=-1, keepdim=True)).all()


@DTYPES
def test_float8_has_small_relative_error(dtype: torch.dtype) -> None:
    """Unlike int8, float8 has steps relative to each number's magnitude."""
    x = torch.tensor([1.0, 0.01, 0.3]).repeat(2)
    numbers, scales = quantize(x, dtype)
    error = ((dequantize(numbers, scales, torch.float64) - x) / x).abs().max()
    assert error < 2**-4 if dtype == torch.float8_e4m3fn else error > 2**-4


@DTYPES
def test_largest_magnitude_and_zeros_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, -7.0], [0.0, 0.0], [7.0, 1e-30]])
    numbers, scales = quantize(x, dtype)
    assert scales.isfinite().all()
    back = dequantize(numbers, scales, torch.float32)
    assert back[0, 1] == -7.0
    assert back[2, 0] == 7.0
    assert not back[1].any()


@pytest.mark.usefixtures("implementation")
@DTYPES
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_write_kv_writes_only_its_slots(dtype: torch.dtype, given: torch.dtype) -> None:
    torch.manual_seed(0)
    kv = torch.randn(5, 2, 3, 32).to(given)
    kv[1, 0, 2] = 0
    cache, scales = torch.full((6, 2, 3, 16, 32), 5, dtype=torch.int8).view(dtype), torch.zeros(6, 2, 3, 16)
    untouched = cache.view(torch.uint8)[0, 0, 0, 0, 0].item()
    blocks, offsets = torch.tensor([5, 1, 3, 1, 4]), torch.tensor([0, 15, 7, 2, 15])
    write_kv(kv, cache, blocks * 16 + offsets, scales)
    numbers, expected_scales = quantize(kv, dtype)
    torch.testing.assert_close(scales[blocks, :, :, offsets], expected_scales, atol=0, rtol=1e-6)
    # The last bit of the ratio may round the other way: a difference of one step.
    written = cache[blocks, :, :, offsets].view(torch.int8).int()
    assert (written - numbers.view(torch.int8).int()).abs().max() <= 1
    back = dequantize(cache[blocks, :, :, offsets], scales[blocks, :, :, offsets], torch.float64)
    assert ((back - kv.double()).abs() <= ERROR[dtype] * kv.double().abs().amax(-1, keepdim=True)).all()
    rest = torch.ones(6, 16, dtype=torch.bool)
    rest[blocks, offsets] = False
    assert (cache.view(torch.uint8).movedim(3, 1)[rest] == untouched).all()
    assert not scales.movedim(3, 1)[rest].any()


@pytest.mark.usefixtures("implementation")
@DTYPES
def test_padding_is_written_to_block_0(dtype: torch.dtype) -> None:
    cache, scales = torch.zeros(2, 2, 1, 4, 32, dtype=dtype), torch.zeros(2, 2, 1, 4)
    write_kv(torch.ones(3, 2, 1, 32), cache, torch.tensor([-1, -1, 5]), scales)
    assert scales.nonzero()[:, [0, 3]].unique(dim=0).tolist() == [[0, 0], [1, 1]]
    assert cache[1, 0, 0, 1].float().tolist() == [LIMITS[dtype]] * 32
