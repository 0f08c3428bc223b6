"""Attention of one step: a decode kernel for rows with one token, a prefill kernel for chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.attention_variant import PLAIN, AttentionVariant
from ..kernels.decode_splits import (
    INVARIANT_ITEM_LEN,
    MAX_RUN_ROWS,
    DecodeSplits,
    split_decodes,
    split_runs,
)
from ..kernels.latent_attention import ChunkBounds, latent_decode_attention
from ..kernels.paged_attention import paged_decode_attention, paged_prefill_attention, paged_span_attention
from ..kernels.sparse_latent import SelectedTokens
from ..kernels.state_runs import StateRuns
from ..proto.block_tables import IntArray
from ..proto.config import EngineConfig


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's paged keys and values.

    Attributes:
        blocks: [N, 2, Hkv, B, D]; of latents [N, 1, 1, B, D], see kernels.latent_attention.
        scales: [N, 2, Hkv, B] float32 if the blocks are quantized, otherwise None.
        group: index of the layer's slots and block tables (see AttentionInputs.of_group): its cache group, and the
            sub-block of the group's places if they are split.
        fixed_scales: of all keys, and of all values, to which `scales` are equal; None if tokens have their own.
        index_keys: the keys of the layer's indexer of blocks; None without one.
    """

    blocks: Tensor
    scales: Tensor | None = None
    group: int = 0
    fixed_scales: tuple[float, float] | None = None
    index_keys: LayerCache | None = None


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of a step's sequences, for layers that keep some.

    Attributes:
        runs: the tokens of each sequence, and the slot of its state. Sequences with one token come first.
        layers: the tensors of each layer with a state, [num_slots, ...]; see proto.model.state.
    """

    runs: StateRuns
    layers: Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The tokens that this rank attends for, with data-parallel attention. Padding is in recorded steps only.

    Attributes:
        index: [N] int64, indices of the tokens among all of the step; 0 for padding.
        places: [N] int64, the same, but the number of all tokens for padding.
    """

    index: Tensor
    places: Tensor


class GeneratedTokens(NamedTuple):
    """Tokens of chunks that were generated before, for example by a sequence that was preempted.

    On a CPU the ops of decode steps attend for them, so that they get the bits that they had.

    Attributes:
        tokens: [N] int64, of the tokens among all of the step.
        sequences: [N] int64.
        lens: [N] int32, tokens of the sequence up to each.
    """

    tokens: Tensor
    sequences: Tensor
    lens: Tensor


class ImageSpan(NamedTuple):
    """Successive tokens of a chunk, which are those of an image, or of a whole prompt, that attend to each other.

    Attributes:
        sequence: index of the chunk's sequence.
        tokens: slice of them among all tokens of the step.
        start, end: positions of the first token, and after the last token of the image or prompt, which they see.
    """

    sequence: int
    tokens: slice
    start: int
    end: int


class ImageSpans(NamedTuple):
    """The images of a step whose tokens attend to each other.

    Attributes:
        windows_only: in layers with a window alone (Gemma 4); in the others their attention is causal.
        ignores_windows: they attend to each other however far apart (PaliGemma).
    """

    spans: tuple[ImageSpan, ...] = ()
    windows_only: bool = False
    ignores_windows: bool = False


NO_SPANS = ImageSpans()


class TokenChoice(NamedTuple):
    """The tokens that the queries of a step attend to (sparse latent attention).

    Attributes:
        selected: of the first queries; None if there are none.
        visible: [T', L] bool, of the T' other queries, which are those of chunks; None if there are none.
    """

    selected: SelectedTokens | None
    visible: Tensor | None


class SplitRule(NamedTuple):
    """The splits of decodes that an engine makes for the steps on a GPU.

    Attributes:
        fixed_item_len: as for split_decodes.
        max_run_rows: rows of a sequence with drafted tokens that share reads of its keys and values; 1 for none.
    """

    fixed_item_len: int | None = None
    max_run_rows: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> SplitRule:
        """Return the rule of an engine.

        Batch-invariant rows are not shared: their tiles would have other rows. Neither are latents, whose tiles are
        full of the heads of one token.
        """
        if config.parallel.batch_invariant:
            return cls(INVARIANT_ITEM_LEN)
        if config.speculative is None or config.model.latent_dim:
            return cls()
        return cls(max_run_rows=min(MAX_RUN_ROWS, 1 + config.speculative.num_speculative_tokens))

    def split(self, seq_lens: Tensor, max_seq_len: int, first_rows: Tensor | None) -> DecodeSplits:
        """Split the decodes of a step, all of whose rows are sequences of their own if `first_rows` is None.

        An engine that drafts splits all its steps alike, so that drafts need no variant of the kernel.
        """
        if self.max_run_rows == 1:
            return split_decodes(seq_lens, max_seq_len, self.fixed_item_len)
        if first_rows is None:
            first_rows = torch.arange(len(seq_lens), dtype=torch.int32, device=seq_lens.device)
        return split_runs(seq_lens, first_rows, self.max_run_rows)


class StepAttention(Protocol):
    """Attention of a step's tokens, by the kernels of quire or of another library."""

    def decode(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        """Compute the attention of the sequences with one token, [num_decodes, Hq, D]."""
        ...

    def prefill(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        """Compute the attention of the tokens of chunks, [T - num_decodes, Hq, D]."""
        ...

    def decode_latents(
        self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, scale: float, value_dim: int
    ) -> Tensor:
        """Compute the absorbed attention of the sequences with one token, [num_decodes, Hq, value_dim].

        Args:
            q: [num_decodes, Hq, D].
            kv_cache: whose blocks are latents and shared keys, [N, 1, 1, B, D].
            value_dim: C, numbers of the latents.
        """
        ...


class OwnAttention:
    """StepAttention by the kernels of quire."""

    def decode(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        tables, lens = inputs.block_tables[: len(q)], inputs.seq_lens[: len(q)]
        return paged_decode_attention(
            q, kv_cache.blocks, tables, lens, scale, inputs.splits, variant, kv_cache.scales
        )

    def prefill(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        split = inputs.num_decodes
        tables, lens = inputs.block_tables[split:], inputs.seq_lens[split:]
        return paged_prefill_attention(
            q, kv_cache.blocks, tables, inputs.query_start, lens, scale, variant, kv_cache.scales
        )

    def decode_latents(
        self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, scale: float, value_dim: int
    ) -> Tensor:
        tables, lens = inputs.block_tables[: len(q)], inputs.seq_lens[: len(q)]
        return latent_decode_attention(
            q, kv_cache.blocks, tables, lens, scale, value_dim, inputs.splits, kv_cache.scales
        )


OWN_ATTENTION = OwnAttention()


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Attention inputs of a step, shared by all layers of a cache group. Sequences with one token come first.

    Attributes:
        num_decodes: number of sequences with one token; the others have chunks.
        slot_mapping: [T] int64, the slot of each token.
        block_tables: [S, M] int32.
        query_start: [S - num_decodes + 1] int32, offset of each chunk's tokens from the first chunk.
        seq_lens: [S] int32, including this step's tokens.
        first_rows: [num_decodes] int32, of sequences that are tokens of one row of the step, the first one (see
            Batch); None if there are no drafted tokens, and on a CPU.
        splits: split of the sequences with one token for a GPU (split-KV); None on a CPU.
        chunks: the lengths of the chunks on the host; None in recorded steps, where the host cannot know them.
        decode_lens: [num_decodes], `seq_lens` of the sequences with one token, on the host; None where the host does
            not know them.
        other_groups: the inputs of further groups, which differ in slots and block tables.
        own_tokens: with data-parallel attention the T tokens that this rank attends for; None if every rank attends
            for all tokens.
        generated: tokens of chunks that are no prompt's; None if there are none, and on a GPU.
        images: images whose tokens attend to each other.
        choices: that of the last layer with an indexer (sparse latent attention), which layers without one use;
            empty before.
        states: None for models whose layers keep none.
        library: what computes the step's attention.
    """

    num_decodes: int
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    first_rows: Tensor | None = None
    splits: DecodeSplits | None = None
    chunks: ChunkBounds | None = None
    decode_lens: IntArray | None = None
    other_groups: tuple[AttentionInputs, ...] = ()
    own_tokens: OwnTokens | None = None
    generated: GeneratedTokens | None = None
    images: ImageSpans = NO_SPANS
    choices: list[TokenChoice] = field(default_factory=list)
    states: StepStates | None = None
    library: StepAttention = OWN_ATTENTION

    @property
    def known_lens(self) -> list[int] | None:
        """`seq_lens` on the host; None in recorded steps, where block tables bound the lengths."""
        if self.chunks is None:
            return None
        lens = self.seq_lens[: self.num_decodes].cpu() if self.decode_lens is None else self.decode_lens
        return [*lens.tolist(), *self.chunks.seq_lens]

    def own(self, values: Tensor) -> Tensor:
        """Return the entries of the tokens that this rank attends for, of values for each token of the step."""
        return values if self.own_tokens is None else values.index_select(0, self.own_tokens.index)

    def tokens_as_sequences(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the sequence of each token, [T] int64, and its tokens up to this one, [T] int32; 0 for padding."""
        split = self.num_decodes
        rows, lens = chunk_tokens(self.query_start, self.seq_lens[split:], num_tokens - split)
        decodes = torch.arange(split, device=rows.device)
        return torch.cat((decodes, rows + split)), torch.cat((self.seq_lens[:split], lens))

    def of_group(self, group: int) -> AttentionInputs:
        """Return the inputs of a cache group, or of one sub-block of it; see split_groups."""
        return self.other_groups[group - 1] if group else self


def chunk_tokens(query_start: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the chunk of each token, [T] int64, and its sequence's tokens up to this one, [T] int32.

    Padding after the last chunk has no tokens; its chunk is the last one.

    Args:
        query_start, seq_lens: of chunks, as in AttentionInputs.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
    if not len(seq_lens):
        return token.long(), torch.zeros_like(token)
    chunk = torch.searchsorted(query_start, token, right=True) - 1
    is_padding = chunk >= len(seq_lens)
    chunk = chunk.clamp(max=len(seq_lens) - 1)
    lens = (seq_lens[chunk] - query_start[chunk + 1] + token + 1).masked_fill_(is_padding, 0)
    return chunk, lens


def split_groups(
    slot_mappings: Sequence[Tensor], block_tables: Sequence[Tensor], splits: Sequence[int], block_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the slots and block tables of each sub-block of all cache groups (see proto.cache_groups).

    Sub-block i of block b has the id ``b * split + i`` in the tensors of its layers.

    Args:
        slot_mappings, block_tables: of each group.
        splits: sub-blocks of a place in each group.
    """
    all_slots, all_tables = list[Tensor](), list[Tensor]()
    for slots, tables, split in zip(slot_mappings, block_tables, splits, strict=True):
        if split == 1:
            all_slots.append(slots)
            all_tables.append(tables)
            continue
        starts = slots // block_size * (split - 1) * block_size
        for index in range(split):
            all_slots.append(slots + starts + index * block_size)
            all_tables.append(tables * split + index)
    return all_slots, all_tables


def with_groups(
    inputs: AttentionInputs, slot_mappings: Sequence[Tensor], block_tables: Sequence[Tensor]
) -> AttentionInputs:
    """Return the inputs with those of all cache groups, of each of which the slots and the block tables are given."""
    slots, tables = slot_mappings[0], block_tables[0]
    others = zip(slot_mappings[1:], block_tables[1:], strict=True)
    return replace(
        inputs,
        slot_mapping=slots,
        block_tables=tables,
        other_groups=tuple(
            replace(inputs, slot_mapping=slots, block_tables=tables) for slots, tables in others
        ),
    )


def with_states(
    inputs: AttentionInputs, runs: StateRuns | None, layers: Sequence[Sequence[Tensor]]
) -> AttentionInputs:
    """Return the inputs with the states of each layer that keeps some; `runs` is None for models without."""
    return inputs if runs is None else replace(inputs, states=StepStates(runs, layers))


def with_splits(inputs: AttentionInputs, block_size: int, rule: SplitRule) -> AttentionInputs:
    """Split the decodes of a step for a GPU; on a CPU return the inputs as they are."""
    num_decodes = inputs.num_decodes
    if num_decodes == 0 or not inputs.seq_lens.is_cuda:
        return inputs
    max_seq_len = inputs.block_tables.shape[1] * block_size
    splits = rule.split(inputs.seq_lens[:num_decodes], max_seq_len, inputs.first_rows)
    others = tuple(replace(other, splits=splits) for other in inputs.other_groups)
    return replace(inputs, splits=splits, other_groups=others)


def with_library(inputs: AttentionInputs, library: StepAttention) -> AttentionInputs:
    """Return the inputs with what computes the step's attention, in all cache groups."""
    others = tuple(replace(other, library=library) for other in inputs.other_groups)
    return replace(inputs, library=library, other_groups=others)


def paged_attention(
    q: Tensor,
    kv_cache: LayerCache,
    inputs: AttentionInputs,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> Tensor:
    """Compute the attention of all of the step's tokens.

    Args:
        q: [T, Hq, D], rotated.
        kv_cache: with the keys and values of the whole step: a row may read what another row writes in this step.

    Returns:
        [T, Hq, D].
    """
    split, library = inputs.num_decodes, inputs.library
    parts: list[Tensor] = []
    if split > 0:
        parts.append(library.decode(q[:split], kv_cache, inputs, scale, variant))
    if split < q.shape[0]:
        parts.append(library.prefill(q[split:], kv_cache, inputs, scale, variant))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if (own := inputs.generated) is not None:
        tables = inputs.block_tables[own.sequences]
        out[own.tokens] = paged_decode_attention(
            q[own.tokens], kv_cache.blocks, tables, own.lens, scale, None, variant, kv_cache.scales
        )
    if variant.window and inputs.images.ignores_windows:
        variant = replace(variant, window=0)
    if variant.window or not inputs.images.windows_only:
        for sequence, tokens, start, end in inputs.images.spans:
            table = inputs.block_tables[sequence]
            out[tokens] = paged_span_attention(
                q[tokens], kv_cache.blocks, table, start, end, scale, variant, kv_cache.scales
            )
    return out
