"""Random sequences in a paged KV cache, and exact attention to them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.quantized_kv import dequantize, quantize


class Paged:
    """Random sequences whose keys and values are in shuffled blocks of a pool; all other slots hold NaN.

    Args:
        dtype: of keys and values.
        stored: dtype of a quantized cache, which has `scales`; the sequences are then the dequantized values.
    """

    def __init__(
        self,
        lens: list[int],
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
        stored: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(0)
        counts = [-(-length // block_size) for length in lens]
        ids = (torch.randperm(sum(counts)) + 1).tolist()
        shape = sum(counts) + 1, 2, num_kv_heads, block_size, head_dim
        self.scales = None if stored is None else torch.full(shape[:-1], torch.nan)
        # int8 has no NaN: there only the scales are poisoned.
        poison = 127 if stored == torch.int8 else torch.nan
        self.cache = torch.full(shape, poison, dtype=stored or dtype)
        self.tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.sequences: list[Tensor] = []  # [2, L, Hkv, D] each
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            own, ids = ids[:count], ids[count:]
            self.tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            kv = torch.randn(2, length, num_kv_heads, head_dim).to(dtype)
            self.sequences.append(self._put(kv, own))
        self.cache, self.tables, self.lens = (x.to(device) for x in (self.cache, self.tables, self.lens))
        self.scales = None if self.scales is None else self.scales.to(device)

    def _put(self, kv: Tensor, block_ids: list[int]) -> Tensor:
        """Store keys and values and return them as they read back."""
        blocks, offsets = self._slots(block_ids, kv.shape[1])
        if self.scales is None:
            self.cache[blocks, :, :, offsets] = kv.transpose(0, 1)
            return kv
        numbers, scales = quantize(kv, self.cache.dtype)
        self.cache[blocks, :, :, offsets] = numbers.transpose(0, 1)
        self.scales[blocks, :, :, offsets] = scales.transpose(0, 1)
        return dequantize(numbers, scales, torch.float64)

    def poison_before(self, firsts: list[int]) -> None:
        """Overwrite the tokens before each sequence's `first` with NaN."""
        for table, first in zip(self.tables.tolist(), firsts, strict=True):
            blocks, offsets = self._slots(table, first)
            poisoned = self.cache if self.scales is None else self.scales
            poisoned[blocks, :, :, offsets] = torch.nan

    def _slots(self, block_ids: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the block ids and offsets of a sequence's first `count` tokens."""
        block_size = self.cache.shape[3]
        places = torch.arange(count)
        return torch.tensor(block_ids, dtype=torch.int64)[places // block_size], places % block_size

    def expected(self, row: int, q: Tensor, scale: float, variant: AttentionVariant = PLAIN) -> Tensor:
        """Return the attention output of the row's last n tokens, [n, Hq, D], in float64 on the CPU."""
        q = q.cpu()
        keys, values = (
            self.sequences[row].double().repeat_interleave(q.shape[1] // self.cache.shape[2], dim=2)
        )
        scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * scale
        if variant.soft_cap:
            scores = variant.soft_cap * (scores / variant.soft_cap).tanh()
        num_queries, num_keys = scores.shape[1:]
        distances = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys)[:, None]
        if variant.alibi_slopes is not None:
            scores += variant.alibi_slopes.cpu().double()[:, None, None] * distances
        hidden = distances > 0
        if variant.window:
            hidden |= distances <= -variant.window
        if variant.chunk:
            keys_at = torch.arange(num_keys)
            hidden |= keys_at < ((keys_at - distances) // variant.chunk * variant.chunk)
        scores = scores.masked_fill(hidden, -torch.inf)
        if variant.sinks is not None:
            sinks = variant.sinks.cpu().double()[:, None, None].expand(-1, num_queries, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[:, :, :num_keys], values)
