"""The attention of a step: store what is new, then choose the kernel by what each row does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from ..kernels.paged_cache import write_kv


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where a step's tokens are, for every layer. Sequences with one token come first.

    Attributes:
        num_decodes: sequences of one token; the rest have chunks.
        slot_mapping: [T] int64, the slot of each token.
        block_tables: [S, M] int32.
        query_start: [S - num_decodes + 1] int32, where each chunk's tokens begin, counted from the first chunk.
        seq_lens: [S] int32, with this step's tokens.
    """

    num_decodes: int
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor


def paged_attention(q: Tensor, kv: Tensor, kv_cache: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
    """Writes all of the step's keys and values, then attends: a row may read what another writes in this step.

    Args:
        q: [T, Hq, D], rotated.
        kv: [T, 2, Hkv, D], keys rotated.
        kv_cache: [N, 2, Hkv, B, D].

    Returns:
        [T, Hq, D].
    """
    write_kv(kv, kv_cache, inputs.slot_mapping)
    split = inputs.num_decodes
    tables, seq_lens = inputs.block_tables, inputs.seq_lens
    if split == q.shape[0]:
        return paged_decode_attention(q, kv_cache, tables, seq_lens, scale)
    chunks = paged_prefill_attention(
        q[split:], kv_cache, tables[split:], inputs.query_start, seq_lens[split:], scale
    )
    if split == 0:
        return chunks
    decodes = paged_decode_attention(q[:split], kv_cache, tables[:split], seq_lens[:split], scale)
    return torch.cat((decodes, chunks))
