"""Splits of decoding sequences' keys among programs (Dao et al., *Flash-Decoding*, 2023).

A batch of a few long sequences has too few (sequence, KV head) pairs to fill a GPU. Sequences are therefore split
into work *items* of equal length, which attend independently and are merged afterwards. The splits are computed on
the device, once per step for all layers.

A sequence whose drafted tokens are verified has several adjacent rows, one per token. They can be a *run*, whose
items attend for all of its rows, so that keys and values are read once.
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
# Rows of a run: more rarely fit into a tile with the heads of a group, and each has room for its partial results.
MAX_RUN_ROWS = 8


class QueryRuns(NamedTuple):
    """Runs of rows of one sequence, each of which has one token more than the row before it.

    Attributes:
        ends: [S] int32, index after the last row of the run that begins at a row; undefined for the other rows.
        first_parts: [S + 1] int32; row s has the partial results ``first_parts[s]:first_parts[s + 1]``, one for each
            item that has tokens of it.
        max_rows: most rows of a run.
    """

    ends: Tensor
    first_parts: Tensor
    max_rows: int


class DecodeSplits(NamedTuple):
    """The work items of one step.

    Attributes:
        item_len: [1] int32, tokens per item; the last item of a sequence may have fewer.
        item_seqs: [I] int32, the sequence of each item; S for unused items.
        first_items: [S + 1] int32; sequence s has items ``first_items[s]:first_items[s + 1]``.
        runs: of a step that may have several rows per sequence; the first row of a run has the items of all. None:
            each row is a sequence of its own.
    """

    item_len: Tensor
    item_seqs: Tensor
    first_items: Tensor
    runs: QueryRuns | None = None


def split_runs(seq_lens: Tensor, first_rows: Tensor, max_rows: int) -> DecodeSplits:
    """Split sequences of several adjacent rows into work items of nearly equal length, which all their rows share.

    Args:
        seq_lens: [S] int32, tokens of the sequence up to the row's own; 0 for padding.
        first_rows: [S] int32, the first row of each row's sequence. Each further one has one token more than the row
            before it. The block table of a run's first row is read for all.
        max_rows: rows that share items; those of a longer sequence are divided.
    """
    rows = torch.arange(len(seq_lens), dtype=torch.int32, device=seq_lens.device)
    first_rows = rows - (rows - first_rows) % max_rows
    ends = torch.searchsorted(first_rows, rows, right=True, out_int32=True)
    own_lens = seq_lens[ends.long() - 1].masked_fill(first_rows != rows, 0)
    splits = split_decodes(own_lens, 0)
    return splits._replace(runs=QueryRuns(ends, _starts(_num_items(seq_lens, splits.item_len)), max_rows))


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
    first_items = _starts(_num_items(seq_lens, item_len))
    items = torch.arange(num_items, dtype=torch.int32, device=seq_lens.device)
    return DecodeSplits(
        item_len, torch.searchsorted(first_items[1:], items, right=True, out_int32=True), first_items
    )


def _num_items(seq_lens: Tensor, item_len: Tensor) -> Tensor:
    return (seq_lens + item_len - 1) // item_len


def _starts(counts: Tensor) -> Tensor:
    """Return the start of each run of these lengths, and the end of the last one, [S + 1] int32."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends))
