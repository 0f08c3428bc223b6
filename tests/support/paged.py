"""Paged: random sequences in a paged cache, and exact attention to them."""

from __future__ import annotations

import torch
from torch import Tensor


class Paged:
    """Random sequences whose keys and values lie in shuffled blocks of a pool that holds NaN elsewhere."""

    def __init__(
        self,
        lens: list[int],
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        counts = [-(-length // block_size) for length in lens]
        ids = (torch.randperm(sum(counts)) + 1).tolist()
        shape = sum(counts) + 1, 2, num_kv_heads, block_size, head_dim
        self.cache = torch.full(shape, torch.nan, dtype=dtype)
        self.tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.sequences: list[Tensor] = []  # [2, L, Hkv, D] each
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            own, ids = ids[:count], ids[count:]
            self.tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            kv = torch.randn(2, length, num_kv_heads, head_dim).to(dtype)
            for place in range(length):
                self.cache[own[place // block_size], :, :, place % block_size] = kv[:, place]
            self.sequences.append(kv)
        self.cache, self.tables, self.lens = (x.to(device) for x in (self.cache, self.tables, self.lens))

    def expected(self, row: int, q: Tensor, scale: float) -> Tensor:
        """Attention of the row's last tokens, [n, Hq, D], in float64 on the CPU."""
        q = q.cpu()
        keys, values = (
            self.sequences[row].double().repeat_interleave(q.shape[1] // self.cache.shape[2], dim=2)
        )
        scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
        return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
