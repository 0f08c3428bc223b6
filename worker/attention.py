"""The attention of a step: the kernel is chosen by what each row does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.decode_splits import DecodeSplits
from ..kernels.paged_attention import paged_decode_attention, paged_prefill_attention


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where a step's tokens are, for every layer. Sequences with one token come first.

    Attributes:
        num_decodes: sequences of one token; the rest have chunks.
        slot_mapping: [T] int64, the slot of each token.
        block_tables: [S, M] int32.
        query_start: [S - num_decodes + 1] int32, where each chunk's tokens begin, counted from the first chunk.
        seq_lens: [S] int32, with this step's tokens.
        splits: how a GPU cuts the sequences of one token; None on a CPU, which does not.
    """

    num_decodes: int
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    splits: DecodeSplits | None = None


def paged_attention(q: Tensor, kv_cache: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
    """Attention of all of the step's tokens.

    Args:
        q: [T, Hq, D], rotated.
        kv_cache: [N, 2, Hkv, B, D], the keys and values of the whole step included: a row may read what another
            writes in the same step.

    Returns:
        [T, Hq, D].
    """
    split = inputs.num_decodes
    tables, seq_lens = inputs.block_tables, inputs.seq_lens
    if split == q.shape[0]:
        return paged_decode_attention(q, kv_cache, tables, seq_lens, scale, inputs.splits)
    chunks = paged_prefill_attention(
        q[split:], kv_cache, tables[split:], inputs.query_start, seq_lens[split:], scale
    )
    if split == 0:
        return chunks
    decodes = paged_decode_attention(
        q[:split], kv_cache, tables[:split], seq_lens[:split], scale, inputs.splits
    )
    return torch.cat((decodes, chunks))
