"""The fused QK norm, rotary embedding (full, partial or none) and cache write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quick_cases import diagonal
from torch import Tensor
from triton_device import DEVICE

from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from quire.kernels.native import ops as cpu
from quire.kernels.quantized_kv import dequantize

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 5, 2, 16
# The second slot is padding; the others are in distinct blocks.
SLOTS = [3 * 16 + 5, -1, 16, 2 * 16 + 15]
# Cache dtype |-> largest error relative to float32.
STORED = {torch.float32: 1e-5, torch.int8: 0.51 / 127, torch.float8_e4m3fn: 16.1 / 448}

# (head_dim, rotated dimensions); the C++ ops support some of them.
SHAPES = [(64, 64), (64, 32), (80, 20), (32, 0), (128, 96), (24, 8)]


@pytest.fixture(params=["native", "reference", pytest.param("triton", marks=DEVICE.marks)])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    if request.param == "triton":
        pytest.importorskip("triton")
        from quire.kernels.gpu import fused_qk_norm_rope_kv_write as kernel

        fused: Callable[..., Tensor] = kernel.fused_qk_norm_rope_kv_write

        def on_device(
            heads: Tensor,
            cache: Tensor,
            *rest: Any,
            kv_scales: Tensor | None,
            fixed_scales: Tensor | None = None,
        ) -> Tensor:
            """Run the kernel on the device and copy caches and scales back."""
            device = torch.device(str(DEVICE.values[0]))
            moved_cache = cache.to(device)
            moved = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in rest]
            if kv_scales is None:
                out = fused(heads.to(device), moved_cache, *moved)
            else:
                moved_scales = kv_scales.to(device)
                fixed = None if fixed_scales is None else fixed_scales.to(device)
                out = fused(heads.to(device), moved_cache, *moved, kv_scales=moved_scales, fixed_scales=fixed)
                kv_scales.copy_(moved_scales)
            cache.copy_(moved_cache)
            return out.cpu()

        return on_device
    if request.param == "reference":
        monkeypatch.setattr(cpu, "supports", lambda x, length=0: False)
    return fused_qk_norm_rope_kv_write


@pytest.mark.parametrize(("shape", "stored", "has_norm"), diagonal(SHAPES, STORED, [True, False]), ids=str)
def test_fused_op_matches_float64(
    op: Callable[..., Tensor], shape: tuple[int, int], stored: torch.dtype, has_norm: bool
) -> None:
    head_dim, rotated_dim = shape
    torch.manual_seed(0)
    heads = torch.randn(len(SLOTS), NUM_HEADS + 2 * NUM_KV_HEADS, head_dim)
    angles = torch.randn(len(SLOTS), rotated_dim // 2)
    norms = [torch.rand(head_dim) + 0.5 if has_norm else None for _ in "qk"]
    cache = torch.zeros(4, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, dtype=stored)
    scales = None if stored == torch.float32 else torch.zeros(cache.shape[:-1])
    expected_q, expected_kv = expected(heads.double(), angles.double(), norms)

    cos = torch.cat((angles.cos(), angles.cos()), dim=-1) if rotated_dim else None
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1) if rotated_dim else None
    q = op(heads, cache, torch.tensor(SLOTS), cos, sin, *norms, 1e-6, kv_scales=scales)
    torch.testing.assert_close(q.double(), expected_q, atol=1e-5, rtol=1e-5)
    for token, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        at = slot // BLOCK_SIZE, slice(None), slice(None), slot % BLOCK_SIZE
        found = cache[at].double() if scales is None else dequantize(cache[at], scales[at], torch.float64)
        bound = STORED[stored] * expected_kv[token].abs().amax(dim=-1, keepdim=True)
        assert ((found - expected_kv[token]).abs() <= bound).all()
        cache[at] = 0
        if scales is not None:
            scales[at] = 0
    assert not cache[1:].float().any()
    assert scales is None or not scales[1:].any()


def expected(heads: Tensor, angles: Tensor, norms: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return the queries [T, Hq, D], and keys and values [T, 2, Hkv, D]."""
    q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    rotated = []
    for x, weight in zip((q, k), norms, strict=True):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        half = angles.shape[1]
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angles).unsqueeze(1)
        rotated.append(torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1))
    return rotated[0], torch.stack((rotated[1], v), dim=1)


def test_duplicate_slots_leave_other_slots_unchanged(op: Callable[..., Tensor]) -> None:
    """One of the duplicates is stored completely, with its scale."""
    heads = torch.ones(3, NUM_HEADS + 2 * NUM_KV_HEADS, 64)
    cache = torch.zeros(3, 2, NUM_KV_HEADS, BLOCK_SIZE, 64, dtype=torch.int8)
    scales = torch.zeros(cache.shape[:-1])
    op(heads, cache, torch.tensor([17, 17, 40]), None, None, None, None, 0.0, kv_scales=scales)
    assert scales.nonzero()[:, [0, 3]].unique(dim=0).tolist() == [[1, 1], [2, 8]]
    back = dequantize(cache, scales, torch.float32)
    torch.testing.assert_close(back[[1, 2], :, :, [1, 8]], torch.ones(2, 2, NUM_KV_HEADS, 64))


def test_fixed_scales_are_those_of_all_keys_and_of_all_values(op: Callable[..., Tensor]) -> None:
    """Numbers past the limit of the type are clamped, not lost."""
    torch.manual_seed(0)
    heads = torch.randn(len(SLOTS), NUM_HEADS + 2 * NUM_KV_HEADS, 64)
    heads[0, NUM_HEADS] = 1e6
    kv = heads[:, NUM_HEADS:].reshape(len(SLOTS), 2, NUM_KV_HEADS, 64).clone()
    cache = torch.zeros(4, 2, NUM_KV_HEADS, BLOCK_SIZE, 64, dtype=torch.float8_e4m3fn)
    scales, fixed = torch.zeros(cache.shape[:-1]), torch.tensor([0.25, 2.0])
    args = torch.tensor(SLOTS), None, None, None, None, 0.0
    op(heads, cache, *args, kv_scales=scales, fixed_scales=fixed)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            at = slot // BLOCK_SIZE, slice(None), slice(None), slot % BLOCK_SIZE
            assert torch.equal(scales[at], fixed[:, None].expand(2, NUM_KV_HEADS))
            expected = kv[token].clamp(-448 * fixed[:, None, None], 448 * fixed[:, None, None])
            found = dequantize(cache[at], scales[at], torch.float32)
            torch.testing.assert_close(found, expected, atol=2**-9 * 2.0, rtol=2**-3)
