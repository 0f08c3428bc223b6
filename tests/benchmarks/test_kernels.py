"""The PyTorch alternatives in the kernel benchmarks compute the same results, and figures compare with the roof."""

from __future__ import annotations

import torch

from benchmarks.kernel_peers import rotate_by_torch
from benchmarks.kernels import (
    HEAD_DIM,
    NUM_HEADS,
    QUIRE,
    Case,
    Roof,
    decode,
    decode_by_sdpa,
    make_cache,
    make_heads,
    prefill,
    prefill_by_sdpa,
)
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write


@torch.inference_mode()
def test_alternatives_equal_the_kernels() -> None:
    torch.manual_seed(0)
    heads, cache, slots, cos, sin = make_heads(19)
    by_torch = rotate_by_torch(heads.clone(), by_torch_cache := cache.clone(), slots, cos, sin)
    torch.testing.assert_close(by_torch, fused_qk_norm_rope_kv_write(heads, cache, slots, cos, sin))
    torch.testing.assert_close(by_torch_cache, cache)

    (cache, *_), tables, lens = make_cache(3, 37)
    q = torch.randn(3, NUM_HEADS, HEAD_DIM)
    ours = decode(cache, q, tables, lens)
    by_sdpa = decode_by_sdpa(cache, q, tables, 37).reshape(ours.shape)
    torch.testing.assert_close(by_sdpa, ours, rtol=1e-4, atol=1e-5)

    (cache, *_), tables, lens = make_cache(1, 39)
    q, starts = torch.randn(18, NUM_HEADS, HEAD_DIM), torch.tensor([0, 18], dtype=torch.int32)
    mask = torch.ones(18, 39, dtype=torch.bool).tril(21)
    by_sdpa = prefill_by_sdpa(cache, q, tables, mask)[0].transpose(0, 1)
    torch.testing.assert_close(by_sdpa, prefill(cache, q, tables, starts, lens), rtol=1e-4, atol=1e-5)


def test_figures_compare_with_the_lower_roof() -> None:
    roof = Roof(copy=100.0, matmul=800.0)
    moving = Case("kernels.copying.small", num_bytes=1000, flops=2000, seconds={QUIRE: 20.0, "torch": 40.0})
    assert {name: figure.value for name, figure in moving.figures(roof).items()} == {
        "kernels.copying.small.us": 20e6,
        "kernels.copying.small.share_of_copy": 0.5,
        "kernels.copying.small.torch_us": 40e6,
    }
    computing = Case("kernels.computing.large", num_bytes=1000, flops=16000, seconds={QUIRE: 40.0})
    assert computing.figures(roof)["kernels.computing.large.share_of_matmul"].value == 0.5
