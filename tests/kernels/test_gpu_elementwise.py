"""Kernels other than attention and sampling, against their PyTorch references in float64."""

from __future__ import annotations

import pytest
import torch
from quick_cases import diagonal
from torch import Tensor

from quire.kernels import (
    activation,
    block_tables,
    dispatch,
    fused_qk_norm_rope_kv_write,
    norm,
    paged_cache,
)

# One rounding of the result; the interpreter truncates bfloat16, which is at most twice the error.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 1000)], ids=str)
def test_rms_norm(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from quire.kernels.gpu.norm import rms_norm

    x, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[1]).to(device, dtype)
    close(rms_norm(x, weight, 1e-5), norm.rms_norm(exact(x), exact(weight), 1e-5))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 1000)], ids=str)
def test_add_rms_norm(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from quire.kernels.gpu.norm import add_rms_norm

    x = torch.randn(shape[0], shape[1] + 3).to(device, dtype)[:, : shape[1]]
    residual, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[1]).to(device, dtype)
    exact_residual = exact(residual)
    expected = norm.add_rms_norm(exact(x), exact_residual, exact(weight), 1e-5)
    close(add_rms_norm(x, residual, weight, 1e-5), expected)
    close(residual, exact_residual)


@DTYPES
def test_add_rms_norm_in_float8(device: str, dtype: torch.dtype) -> None:
    """One row is all zeros."""
    from quire.kernels.gpu.norm import add_rms_norm_float8

    x, residual, weight = (torch.randn(shape).to(device, dtype) for shape in ((4, 80), (4, 80), (80,)))
    x[2], residual[2] = 0, 0
    exact_residual = exact(residual)
    expected = norm.add_rms_norm(exact(x), exact_residual, exact(weight), 1e-5)
    codes, scales = add_rms_norm_float8(x, residual, weight, 1e-5)
    assert codes.dtype == torch.float8_e4m3fn
    largest = expected.abs().amax(dim=1)
    torch.testing.assert_close(
        exact(scales)[:, 0], torch.where(largest > 0, largest / 448, 1.0), atol=1e-6, rtol=1e-5
    )
    # float8 has 3 fraction bits, and steps of 2^-9 below the smallest normal number.
    error = (codes.float().cpu().double() * exact(scales) - expected).abs()
    is_right = error <= expected.abs() / 16 * 1.001 + exact(scales) / 512
    if device == "cpu":  # The interpreter halves numbers that round up to a power of two.
        is_right |= torch.frexp(expected / exact(scales)).mantissa.abs() > 0.96875
    assert is_right.all()
    close(residual, exact_residual)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 74), (2, 2050)], ids=str)
@pytest.mark.parametrize("gate", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates(device: str, gate: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from quire.kernels.gpu import activation as kernels

    gate_up = (3 * torch.randn(shape)).to(device, dtype)
    close(getattr(kernels, gate)(gate_up), getattr(activation, gate)(exact(gate_up)))


@DTYPES
def test_clamped_gate(device: str, dtype: torch.dtype) -> None:
    from quire.kernels.gpu import activation as kernels

    gate_up = (3 * torch.randn(3, 74)).to(device, dtype)
    for offset in (1.0, 0.0):
        expected = activation.clamped_silu_and_mul(exact(gate_up), 1.702, 2.0, offset)
        close(kernels.clamped_silu_and_mul(gate_up, 1.702, 2.0, offset), expected)


@DTYPES
@pytest.mark.parametrize(("head_dim", "has_norm"), diagonal([16, 64, 80, 96, 128, 256], [False, True]))
def test_fused_qk_norm_rope_kv_write(device: str, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    from quire.kernels.gpu.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write as fused

    num_q_heads, num_kv_heads, block_size = 5, 2, 16
    slots = torch.tensor([3 * 16 + 5, -1, 16, -1, 2 * 16 + 15], device=device)
    heads = torch.randn(len(slots), num_q_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    angles = torch.randn(len(slots), head_dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)
    q_norm, k_norm = (torch.rand(head_dim).to(device, dtype) + 0.5 if has_norm else None for _ in "qk")
    cache = torch.zeros(4, 2, num_kv_heads, block_size, head_dim, device=device, dtype=dtype)
    expected_cache = exact(cache)
    expected_q = fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write(
        exact(heads), expected_cache, slots.cpu(), exact(cos), exact(sin),
        None if q_norm is None else exact(q_norm), None if k_norm is None else exact(k_norm), 1e-6,
    )  # fmt: skip
    q = fused(heads, cache, slots, cos, sin, q_norm, k_norm, 1e-6)
    close(q, expected_q)
    # The reference writes padding to block 0; the kernel does not write it.
    assert not cache[0].any()
    close(cache[1:], expected_cache[1:])
    assert torch.equal(cache[1:] != 0, (expected_cache[1:] != 0).to(device))


def test_update_block_tables(device: str) -> None:
    from quire.kernels.gpu.block_tables import update_block_tables

    tables = torch.randint(0, 99, (5, 70), dtype=torch.int32)
    places = torch.randperm(350)[:300]
    entries = torch.stack((places // 70, places % 70, torch.arange(300) + 100), dim=1).int()
    on_device = tables.to(device)
    update_block_tables(on_device, entries.to(device))
    block_tables.update_block_tables(tables, entries)
    assert torch.equal(on_device.cpu(), tables)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_copy_blocks(device: str, dtype: torch.dtype) -> None:
    from quire.kernels.gpu.paged_cache import copy_blocks

    caches = torch.randn(3, 6, 2, 2, 16, 48).to(device, dtype)
    expected = caches.clone()
    sources, destinations = torch.tensor([1, 4, 1], device=device), torch.tensor([5, 2, 3], device=device)
    expected[:, destinations] = caches[:, sources]
    copy_blocks(caches, sources, destinations)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("is_scattered", [False, True], ids=["copies", "kernel"])
def test_swap_out_and_in_preserves_blocks(
    device: str, is_scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_scattered:
        monkeypatch.setattr(paged_cache, "MIN_SCATTERED_COPIES", 0)
        monkeypatch.setattr(paged_cache, "has_kernels", lambda tensor: True)
        monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: True)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor) if device == "cpu" else None
    caches = torch.randn(2, 9, 2, 2, 16, 8).to(device)
    host = torch.full((2, 7, 2, 2, 16, 8), torch.nan)
    host = host.pin_memory() if device == "cuda" else host
    before = caches.clone()
    out = torch.tensor([[3, 2], [8, 6], [4, 3], [5, 4], [1, 1]])
    paged_cache.swap_blocks(caches, host, out)
    back = torch.tensor([[2, 7], [6, 8], [3, 2], [4, 3], [1, 6]])
    paged_cache.swap_blocks(host, caches, back)
    places = dict(out.tolist())
    for source, destination in places.items():
        assert torch.equal(host[:, destination], before[:, source].cpu())
    for host_block, destination in back.tolist():
        assert torch.equal(caches[:, destination].cpu(), host[:, host_block])
    assert host[:, [0, 5]].isnan().all()
    assert torch.equal(caches[:, [0, 1, 4, 5]], before[:, [0, 1, 4, 5]])


def test_runs_groups_adjacent_blocks() -> None:
    assert list(paged_cache._runs([[7, 3], [2, 9], [3, 10], [8, 4], [4, 12]])) == [
        (2, 9, 2), (4, 12, 1), (7, 3, 2)
    ]  # fmt: skip
    assert list(paged_cache._runs([])) == []


def exact(x: Tensor) -> Tensor:
    return x.double().cpu()


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(exact(actual), expected, atol=tolerance, rtol=tolerance)
