"""How the keys of decoding sequences are split among programs (Dao et al., *Flash-Decoding*, 2023).

A batch of a few long sequences has too few (sequence, KV head) pairs to fill a GPU. Sequences are therefore cut into
*items* of equal length, which attend on their own and are merged afterwards. The cut is worked out on the device,
once a step, for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Items beyond one a sequence: with 8 KV heads a single sequence still fills some 2,000 programs.
NUM_EXTRA_ITEMS = 256
# Shorter items would cost more in merging than they win. A multiple of every tile, so that only a sequence's
# last tile is partly filled.
MIN_ITEM_LEN = 256
# Where items must not depend on the batch.
INVARIANT_ITEM_LEN = 1024


class DecodeSplits(NamedTuple):
    """The cut of one step.

    Attributes:
        item_len: [1] int32, tokens an item, the last of a sequence excepted.
        item_seqs: [I] int32, the sequence of each item; S for items that are not needed.
        first_items: [S + 1] int32; sequence s has the items ``first_items[s]:first_items[s + 1]``.
    """

    item_len: Tensor
    item_seqs: Tensor
    first_items: Tensor


def split_decodes(seq_lens: Tensor, max_seq_len: int, fixed_item_len: int | None = None) -> DecodeSplits:
    """Cuts sequences into items that differ little in length.

    Args:
        seq_lens: [S] int32; 0 for padding, which has no item.
        max_seq_len: what the block tables have room for.
        fixed_item_len: tokens an item, whatever else is in the batch: a sequence's sums are then made in the same
            order, bit for bit, in every batch. A multiple of MIN_ITEM_LEN.
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
