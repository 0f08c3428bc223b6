"""Elementwise ops against float64 definitions, and exact writes to the paged cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.kernels.activation import GatedActivation, clamped_silu_and_mul, gelu_tanh_and_mul, silu_and_mul
from quire.kernels.gumbel import gumbel_noise, random_keys
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.kernels.paged_cache import copy_blocks, write_kv
from quire.kernels.rope import apply_rope

MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (2, 3, 80)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, atol=1e-6, rtol=1e-6)


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("length", [5, 64])
def test_gates(length: int) -> None:
    gate_up = 2 * torch.randn(3, 2 * length)
    gate, up = gate_up.double().chunk(2, dim=-1)
    gelu = gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
    for op, exact in ((silu_and_mul, gate * gate.sigmoid() * up), (gelu_tanh_and_mul, gelu * up)):
        torch.testing.assert_close(op(gate_up).double(), exact, atol=1e-6, rtol=1e-6)
    bounded = (gate * gate.sigmoid()).clamp(max=0.5) * up.clamp(-0.5, 0.5)
    found = GatedActivation("silu", limit=0.5)(gate_up).double()
    torch.testing.assert_close(found, bounded, atol=1e-6, rtol=1e-6)
    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
    for offset in (1.0, 0.0):
        clamped = gate * (1.7 * gate).sigmoid() * (up + offset)
        found = clamped_silu_and_mul(gate_up, 1.7, 1.0, offset).double()
        torch.testing.assert_close(found, clamped, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 80])
def test_rope_rotates_pairs_by_their_angle(head_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """Halves of 4, 8 and 40 numbers: whole vectors, a remainder, and both."""
    torch.manual_seed(0)
    half = head_dim // 2
    x = torch.randn(4, 3, head_dim).to(dtype)
    angles = torch.randn(4, half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(
        1j * angles.double()
    ).unsqueeze(1)
    exact = torch.cat((pairs.real, pairs.imag), dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = torch.cat((x, torch.ones(4, 2, head_dim, dtype=dtype)), dim=1)
    apply_rope(wide[:, :3], torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    torch.testing.assert_close(wide[:, :3].double(), exact, atol=tolerance, rtol=tolerance)
    assert torch.equal(wide[:, 3:], torch.ones(4, 2, head_dim, dtype=dtype))


def test_write_kv_writes_only_its_slots() -> None:
    cache = torch.zeros(5, 2, 3, 4, 2)
    kv = torch.randn(4, 2, 3, 2)
    write_kv(kv, cache, torch.tensor([4 * 3 + 1, 4 * 1 + 3, -1, 4 * 4]))
    expected = torch.zeros_like(cache)
    expected[3, :, :, 1], expected[1, :, :, 3], expected[4, :, :, 0] = kv[0], kv[1], kv[3]
    assert torch.equal(cache[1:], expected[1:])


def test_copy_blocks_copies_every_layer() -> None:
    layer = torch.arange(6.0).view(6, 1, 1, 1, 1).repeat(1, 2, 1, 4, 2)
    caches = torch.stack((layer, 10 + layer))
    copy_blocks(caches, torch.tensor([1, 4, 1]), torch.tensor([2, 3, 5]))
    assert caches[:, :, 0, 0, 0, 0].tolist() == [[0, 1, 1, 4, 4, 1], [10, 11, 11, 14, 14, 11]]
    assert torch.equal(caches, caches[..., :1, :1, :1, :1].expand_as(caches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copy_blocks_copies_dtypes_that_numpy_lacks(dtype: torch.dtype) -> None:
    caches = torch.arange(24.0).view(2, 3, 1, 1, 2, 2).to(dtype)
    expected = caches[:, 1].clone()
    copy_blocks(caches, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(caches[:, 2].float(), expected.float())


def test_copy_blocks_starts_no_threads() -> None:
    """OpenMP would start threads for the calling thread, and spin in them while a rank computes its step."""
    # Two blocks have 131,072 numbers. torch divides work from 32,768 on.
    caches = torch.zeros(8, 4, 2, 4, 16, 64)
    ids = torch.tensor([1, 2]), torch.tensor([3, 0])

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def started_by_copy() -> set[str]:
        before = threads()
        copy_blocks(caches, *ids)
        return threads() - before

    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(started_by_copy).result(60.0) == set()
    finally:
        torch.set_num_threads(num_threads)


def reference_bits(seed: int, position: int, token_id: int) -> int:
    """Compute the random bits in plain integers."""
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK_64
    x ^= x >> 31
    low, high = x & MASK_32, x >> 32
    h = (token_id * 0x9E3779B9 + low) & MASK_32
    h ^= h >> 16
    h = h * 0x21F0AAAD & MASK_32
    h ^= high
    h ^= h >> 15
    h = h * 0xD35A2D97 & MASK_32
    return h ^ h >> 15


def test_gumbel_noise_equals_plain_integer_generator() -> None:
    seeds = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 123456789]
    positions, token_ids = [0, 5, 131071], [0, 1, 2, 50_000, 151_935]
    keys = random_keys(
        torch.tensor(seeds).repeat_interleave(len(positions)), torch.tensor(positions).repeat(len(seeds))
    )
    noise = gumbel_noise(keys, torch.tensor([token_ids], dtype=torch.int32))
    rows = [(seed, position) for seed in seeds for position in positions]
    bits = [
        [reference_bits(seed & MASK_64, position, t) & 0x7FFFFFFF for t in token_ids]
        for seed, position in rows
    ]
    uniform = (torch.tensor(bits, dtype=torch.float64) + 0.5) * 2**-31
    exact = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(noise.double(), exact, atol=1e-5, rtol=1e-5)


def test_gumbel_noise_has_expected_mean_and_variance() -> None:
    keys = random_keys(torch.zeros(200, dtype=torch.int64), torch.arange(200))
    noise = gumbel_noise(keys, torch.arange(20_000, dtype=torch.int32).unsqueeze(0))
    assert noise.isfinite().all()
    assert abs(noise.double().mean() - 0.5772157) < 2e-3
    assert abs(noise.double().var() - 1.6449341) < 5e-3
