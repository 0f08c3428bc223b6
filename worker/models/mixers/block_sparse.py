"""BlockSparseAttention: attention to blocks of keys that an indexer chooses (kernels.block_attention)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.block_attention import (
    block_attention,
    choose_blocks,
    chosen_tables,
    gather_index_keys,
    score_blocks,
)
from ....kernels.norm import rms_norm
from ....kernels.paged_attention import paged_prefill_attention
from ....kernels.paged_cache import write_kv
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.rope import apply_rope
from ....proto.model.attention import AttentionSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ...comm.shard import Shard
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations
from ..load_context import LoadContext
from .attention import Attention
from .query_tiles import Tile, query_tiles


class BlockSparseAttention:
    """Attention, and its indexer: one key per token, and a query for each KV head.

    Ranks have the same keys of the indexer, and the queries of their own KV heads.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str) -> None:
        assert own.indexer is not None
        self._spec, self._sizes, self._eps = own, own.indexer, spec.norm_eps
        self._attention = Attention(load, spec, own, name, shares_input=True)
        self.qkv, self.output, self.rope = self._attention.qkv, self._attention.output, own.rope
        dim = self._sizes.head_dim
        projections = [
            Projection(f"{name}.indexer.q_proj", load.head_shard(own.num_kv_heads, dim)),
            Projection(f"{name}.indexer.k_proj", Shard(0, 1, dim)),
        ]
        self._index = ColumnParallelLinear(load, projections, spec.hidden_size, bias=False, shares_input=True)
        self._q_norm, self._k_norm = (
            load.norm(f"{name}.indexer.{part}_norm", dim, spec.norms.offset) for part in ("q", "k")
        )

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens to both caches before attention reads them."""
        assert isinstance(x, Tensor)  # the input is shared
        assert kv_cache.index_keys is not None
        own = inputs.of_group(kv_cache.group)
        q, _ = self._attention.write(self.qkv.forward(x), rotations, kv_cache, own)
        index_q = self._write_keys(x, rotations, kv_cache.index_keys, inputs)
        if self._attends_to_all(own, kv_cache.blocks.shape[3]):
            attended = paged_attention(q, kv_cache, own, self._spec.scale, self._attention.variant)
        else:
            attended = self._attend_sparsely(q, index_q, kv_cache, inputs, own)
        return self.output.forward_partial(attended.flatten(1))

    def _attends_to_all(self, inputs: AttentionInputs, block_size: int) -> bool:
        """Return whether no sequence can have more tokens than a query attends to."""
        lens = inputs.known_lens
        longest = inputs.block_tables.shape[1] * block_size if lens is None else max(lens, default=0)
        return longest <= self._sizes.num_tokens

    def _write_keys(
        self, x: Tensor, rotations: Rotations, cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """Write the indexer's keys of tokens; return its queries, [T, Hkv, I]."""
        heads = self._index.forward(x).unflatten(1, (-1, self._sizes.head_dim))
        q = rms_norm(heads[:, :-1].contiguous(), self._q_norm, self._eps)
        keys = rms_norm(heads[:, -1:].contiguous(), self._k_norm, self._eps)
        cos, sin = rotations[self.rope]
        if cos is not None and sin is not None:
            apply_rope(q, cos, sin)
            apply_rope(keys, cos, sin)
        halves = keys.view(len(x), 2, 1, -1)
        write_kv(halves, cache.blocks, inputs.of_group(cache.group).slot_mapping)
        return q

    def _attend_sparsely(
        self, q: Tensor, index_q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, own: AttentionInputs
    ) -> Tensor:
        """Return the attention of all of the step's tokens, [T, Hq, D].

        Tokens of prompts that attend to all before them are left to the op of chunks, whatever follows them in the
        step, so that on a CPU their bits depend on nothing else.

        Args:
            own: the inputs of the cache's group.
        """
        attended, most = torch.empty_like(q), self._sizes.num_tokens
        for tile in query_tiles(own, kv_cache.blocks.shape[3]):
            is_chunk = tile.tokens.start >= own.num_decodes
            if not is_chunk or tile.length > most or own.generated is not None:
                attended[tile.tokens] = self._attend(q[tile.tokens], index_q, tile, kv_cache, inputs)
        early = early_chunks(own, most)
        if early is not None:
            found = paged_prefill_attention(
                q[early.tokens], kv_cache.blocks, own.block_tables[early.sequences], early.query_start,
                early.seq_lens, self._spec.scale,
            )  # fmt: skip
            is_prompt = torch.ones(len(q), dtype=torch.bool, device=q.device)
            if own.generated is not None:
                is_prompt[own.generated.tokens] = False
            kept = is_prompt[early.tokens]
            attended[early.tokens[kept]] = found[kept]
        return attended

    def _attend(
        self, q: Tensor, index_q: Tensor, tile: Tile, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """Return the attention of a tile's queries to the blocks that they choose, [G T, Hq, D]."""
        sizes, cache = self._sizes, kv_cache.index_keys
        assert cache is not None
        block_size, shape = kv_cache.blocks.shape[3], tile.positions.shape
        tables = inputs.of_group(cache.group).block_tables[tile.sequences]
        keys = gather_index_keys(cache.blocks, tables[:, : -(-tile.length // block_size)])[:, : tile.length]
        queries = index_q[tile.tokens].unflatten(0, shape)
        scores = score_blocks(queries, keys, tile.positions, sizes.block_len).flatten(0, 1)
        chosen, lens = choose_blocks(
            scores, tile.positions.flatten(), sizes.block_len, sizes.top_k, sizes.num_local
        )
        rows = tile.sequences.repeat_interleave(shape[1])
        own_tables = inputs.of_group(kv_cache.group).block_tables
        places = chosen_tables(chosen, own_tables, rows, sizes.block_len // block_size)
        return block_attention(q, kv_cache.blocks, places, lens, self._spec.scale)


class EarlyChunks(NamedTuple):
    """The beginnings of chunks, whose tokens attend to all before them.

    Attributes:
        tokens: [n] int64, of the step.
        sequences: [S'] int64.
        query_start, seq_lens: of these sequences, as for kernels.paged_attention.
    """

    tokens: Tensor
    sequences: Tensor
    query_start: Tensor
    seq_lens: Tensor


def early_chunks(inputs: AttentionInputs, most: int) -> EarlyChunks | None:
    """Return the tokens of chunks that are among the first `most` of their sequences; None if there are none."""
    start = split = inputs.num_decodes
    tokens, sequences, counts, lens = list[int](), list[int](), [0], list[int]()
    for index, (count, length) in enumerate(zip(*(inputs.chunks or ((), ())), strict=True)):
        num_early = min(length, most) - (length - count)
        if num_early > 0:
            tokens += range(start, start + num_early)
            sequences.append(split + index)
            counts.append(len(tokens))
            lens.append(min(length, most))
        start += count
    if not tokens:
        return None
    device = inputs.seq_lens.device
    ints = (torch.tensor(values, dtype=torch.int32, device=device) for values in (counts, lens))
    index_of = (torch.tensor(values, dtype=torch.int64, device=device) for values in (tokens, sequences))
    return EarlyChunks(*index_of, *ints)
