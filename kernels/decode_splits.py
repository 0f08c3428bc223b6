"""Splits of decoding sequences' keys among programs (Dao et al., *Flash-Decoding*, 2023).

A batch of a few long sequences has too few (sequence, KV head) pairs to fill a GPU. Sequences are therefore split
into work *items* of equal length, which attend independently and are merged afterwards. The splits are computed on
the device, once per step for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Items beyond one per sequence: with 8 KV heads a single sequence still fills some 2,000 programs.
NUM_EXTRA_ITEMS = 256
# Shorter items cost more in merging than they save. A multiple of every tile, so that only a sequence's last tile is
# partly filled.
MIN_ITEM_LEN = 256
# Length of items for batch-invariant results.
INVARIANT_ITEM_LEN = 1024


class DecodeSplits(NamedTuple):
    """The work items of one step.

    Attributes:
        item_len: [1] int32, tokens per item; the last item of a sequence may have fewer.
        item_seqs: [I] int32, the sequence of each item; S for unused items.
        first_items: [S + 1] int32; sequence s has items ``first_items[s]:first_items[s + 1]``.
    """

    item_len: Tensor
    item_seqs: Tensor
    first_items: Tensor


def split_decodes(seq_lens: Tensor, max_seq_len: int, fixed_item_len: int | None = None) -> DecodeSplits:
    """Split sequences into work items of nearly equal length.

    Args:
        seq_lens: [S] int32; 0 for padding, which gets no item.
        max_seq_len: tokens that the block tables have room for.
        fixed_item_len: tokens per item in every batch, a multiple of MIN_ITEM_LEN: a sequence's sums are then
            bitwise equal in every batch. None: chosen by the batch's number of tokens.
    """
    num_seqs = seq_lens.shape[0]
    if fixed_item_len is None:
        num_items = num_seqs + NUM_EXTRA_ITEMS
        fair_len = seq_lens.sum().view(1) // (NUM_EXTRA_ITEMS * MIN_ITEM_LEN) + 1
        item_len = (fair_len * MIN_ITEM_LEN).int()
    else:
        num_items = num_seqs * -(-max_seq_len // fixed_item_len)
        item_len = torch.full((1,), fixed_item_len, dtype=torch.int32, device=seq_lens.device)
    last_items = ((seq_lens + item_len - 1) // item_len).cumsum(0, dtype=torch.int32)
    items = torch.arange(num_items, dtype=torch.int32, device=seq_lens.device)
    return DecodeSplits(
        item_len,
        torch.searchsorted(last_items, items, right=True, out_int32=True),
        torch.cat((last_items.new_zeros(1), last_items)),
    )
