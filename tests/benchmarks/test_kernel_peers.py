"""The PyTorch alternatives in the kernel benchmarks compute the same results as the kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import kernels_cpu
from benchmarks.kernel_peers import causal_after, rotate_by_torch
from benchmarks.kernels_cpu import HEAD_DIM, NUM_HEADS, make_cache, make_heads
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels_cpu, "flex_by_compiler", flex_attention)


@torch.inference_mode()
def test_rotate_by_torch_equals_the_fused_op() -> None:
    heads, cache, slots, cos, sin = make_heads(19)
    by_torch = rotate_by_torch(heads.clone(), by_torch_cache := cache.clone(), slots, cos, sin)
    torch.testing.assert_close(by_torch, fused_qk_norm_rope_kv_write(heads, cache, slots, cos, sin))
    torch.testing.assert_close(by_torch_cache, cache)


@torch.inference_mode()
def test_decode_attention_alternatives_equal_the_kernel() -> None:
    (cache, *_), tables, lens = make_cache(3, 37)
    q = torch.randn(3, NUM_HEADS, HEAD_DIM)
    ours = kernels_cpu.decode(cache, q, tables, lens)
    for peer in (kernels_cpu.decode_by_sdpa, kernels_cpu.decode_by_flex):
        torch.testing.assert_close(peer(cache, q, tables, 37).reshape(ours.shape), ours, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_prefill_attention_alternatives_equal_the_kernel() -> None:
    cached_len, chunk_len = 21, 18
    (cache, *_), tables, lens = make_cache(1, cached_len + chunk_len)
    q, starts = torch.randn(chunk_len, NUM_HEADS, HEAD_DIM), torch.tensor([0, chunk_len], dtype=torch.int32)
    ours = kernels_cpu.prefill(cache, q, tables, starts, lens)
    mask = torch.ones(chunk_len, cached_len + chunk_len, dtype=torch.bool).tril(cached_len)
    by_sdpa = kernels_cpu.prefill_by_sdpa(cache, q, tables, mask)
    by_flex = kernels_cpu.prefill_by_flex(cache, q, tables, causal_after(cached_len, chunk_len))
    for peer in (by_sdpa, by_flex):
        torch.testing.assert_close(peer[0].transpose(0, 1), ours, rtol=1e-4, atol=1e-5)
