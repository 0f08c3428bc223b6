"""OutputTokens: the tokens of a step whose hidden states are read after the last layer.

A row reads that of the last token of its prompt only. The last layer computes the keys and values of all tokens, but
attention and the feed-forward network of these tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.latent_attention import ChunkBounds
from ..attention import NO_SPANS, AttentionInputs, GeneratedTokens, with_groups


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Tokens whose hidden states are read.

    Attributes:
        index: [N] int64, ascending indices among the T tokens of the step; N is at least 1.
        inputs: attention inputs of these tokens as queries. The slots are those of all T tokens.
        sampled_index: the tokens to sample from, as in Batch, but as indices among the N.
    """

    index: Tensor
    inputs: AttentionInputs
    sampled_index: Tensor


def select_output_tokens(
    sampled_index: Tensor, num_tokens: int, inputs: AttentionInputs
) -> OutputTokens | None:
    """Return the tokens of a step that rows sample from. Returns None for all, and if the step has no chunks.

    Args:
        sampled_index: as Batch.sampled_index; each is the last token of its sequence.
    """
    if inputs.num_decodes == num_tokens:
        return None
    if len(sampled_index):
        index, order = sampled_index.sort()
    else:  # any token: ops take at least one
        index, order = sampled_index.new_tensor([num_tokens - 1]), sampled_index
    if len(index) == num_tokens:
        return None
    return OutputTokens(index, _queries(inputs, index), order.argsort())


def _queries(inputs: AttentionInputs, index: Tensor) -> AttentionInputs:
    """Return the inputs for the last tokens of some sequences, given by the indices of these tokens."""
    num_decodes = inputs.num_decodes
    chunk_ends = inputs.query_start[1:].long() + num_decodes
    num_before = torch.searchsorted(chunk_ends, index, right=True)
    sequences = torch.where(index < num_decodes, index, num_decodes + num_before)
    num_kept_decodes = int((index < num_decodes).sum())
    num_chunks = len(index) - num_kept_decodes
    seq_lens = inputs.seq_lens.index_select(0, sequences)
    groups = inputs, *inputs.other_groups
    generated = inputs.generated
    if generated is not None:
        own = torch.isin(index, generated.tokens).nonzero().flatten()
        generated = GeneratedTokens(own, own, seq_lens[own]) if len(own) else None
    queries = replace(
        inputs,
        generated=generated,
        images=NO_SPANS,  # the last token of an image sees all of it in any case
        num_decodes=num_kept_decodes,
        query_start=torch.arange(num_chunks + 1, dtype=torch.int32, device=index.device),
        seq_lens=seq_lens,
        chunks=ChunkBounds([1] * num_chunks, seq_lens[num_kept_decodes:].tolist()),
    )
    tables = [group.block_tables.index_select(0, sequences) for group in groups]
    return with_groups(queries, [group.slot_mapping for group in groups], tables)
