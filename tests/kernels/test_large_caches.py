"""Caches of more than 2^31 numbers, whose offsets do not fit into 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

HEAD_DIM, BLOCK_SIZE, SEQ_LEN = 32, 16, 20
# Numbers from block to block: block 2 begins beyond 2^31. Untouched pages occupy no memory.
BLOCK_STRIDE = (1 << 30) + 64


@pytest.fixture
def kv_cache(device: str) -> Tensor:
    """Return a cache [3, 2, 1, B, D] int8 of small integers."""
    torch.manual_seed(0)
    block_len = 2 * BLOCK_SIZE * HEAD_DIM
    memory = torch.empty(2 * BLOCK_STRIDE + block_len, dtype=torch.int8, device=device)
    strides = BLOCK_STRIDE, block_len // 2, block_len // 2, HEAD_DIM, 1
    blocks = memory.as_strided((3, 2, 1, BLOCK_SIZE, HEAD_DIM), strides)
    blocks.copy_(torch.randint(-3, 4, blocks.shape))
    return blocks


def exact_attention(q: Tensor, kv_cache: Tensor, block_ids: list[int]) -> Tensor:
    """Compute attention of the last token's queries [Hq, D] to a sequence in those blocks, in float64."""
    keys, values = kv_cache[block_ids, :, 0].cpu().double().transpose(0, 1).flatten(1, 2)[:, :SEQ_LEN]
    return (q.cpu().double() @ keys.T * 0.1).softmax(dim=-1) @ values


def test_attention_uses_64_bit_offsets(kv_cache: Tensor) -> None:
    from quire.kernels.gpu.paged_decode import paged_decode_attention
    from quire.kernels.gpu.paged_prefill import paged_prefill_attention

    device = kv_cache.device
    q = torch.randn(1, 2, HEAD_DIM, device=device)
    tables = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([SEQ_LEN], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    expected = exact_attention(q[0], kv_cache, [2, 1])
    decoded = paged_decode_attention(q, kv_cache, tables, lens, 0.1)
    prefilled = paged_prefill_attention(q, kv_cache, tables, starts, lens, 0.1)
    for out in (decoded, prefilled):
        torch.testing.assert_close(out[0].cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_cache_write_uses_64_bit_offsets(kv_cache: Tensor) -> None:
    from quire.kernels.gpu.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write

    heads = torch.tensor([1.0, 5.0, 7.0], device=kv_cache.device).view(1, 3, 1).repeat(1, 1, HEAD_DIM)
    slot = torch.tensor([2 * BLOCK_SIZE + 3], device=kv_cache.device)
    expected = kv_cache.clone()
    expected[2, 0, 0, 3], expected[2, 1, 0, 3] = 5, 7
    fused_qk_norm_rope_kv_write(heads, kv_cache, slot, None, None)
    assert torch.equal(kv_cache, expected)
