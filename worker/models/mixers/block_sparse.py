"""BlockSparseAttention: attention to blocks of keys that an indexer chooses (kernels.block_attention)."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.activation import sigmoid
from ....kernels.block_attention import (
    block_attention,
    choose_blocks,
    choose_pooled_blocks,
    chosen_tables,
    gather_index_keys,
    score_blocks,
)
from ....kernels.norm import rms_norm
from ....kernels.paged_attention import paged_prefill_attention
from ....kernels.paged_cache import write_kv
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.rope import apply_rope
from ....kernels.shared_attention import entry_places, gather_entries, token_windows
from ....kernels.state_runs import StateRuns
from ....proto.model.attention import AttentionSpec, BlockIndexerSpec
from ....proto.model.pooled import PooledKeysSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ...comm.shard import Shard
from ...memory.host_to_device import to_device_once
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations
from ..load_context import LoadContext
from .attention import Attention
from .query_tiles import Tile, query_tiles, whole_ends
from .state_mixer import StateMixer


class BlockSparseAttention:
    """Attention to blocks of keys, and its indexer.

    Ranks have the same keys of the indexer. That of MiniMax-M3 has one per token, and a query for each KV head, of
    which ranks have those of their own KV heads.
    """

    qkv: ColumnParallelLinear
    rope: str | None

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str) -> None:
        assert own.indexer is not None
        self._spec, self._eps = own, spec.norm_eps
        self._block_len, self._most = own.indexer.block_len, own.indexer.num_tokens
        self._attention = Attention(load, spec, own, name, shares_input=True)
        self.qkv, self.output, self.rope = self._attention.qkv, self._attention.output, own.rope
        self._read_indexer(load, spec, own, f"{name}.indexer")

    def _read_indexer(self, load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str) -> None:
        assert isinstance(own.indexer, BlockIndexerSpec)
        self._sizes = own.indexer
        dim = own.indexer.head_dim
        projections = [
            Projection(f"{name}.q_proj", load.head_shard(own.num_kv_heads, dim)),
            Projection(f"{name}.k_proj", Shard(0, 1, dim)),
        ]
        self._index = ColumnParallelLinear(load, projections, spec.hidden_size, bias=False, shares_input=True)
        self._q_norm, self._k_norm = (
            load.norm(f"{name}.{part}_norm", dim, spec.norms.offset) for part in ("q", "k")
        )

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens to both caches before attention reads them."""
        assert isinstance(x, Tensor)  # the input is shared
        assert kv_cache.index_keys is not None
        own = inputs.of_group(kv_cache.group)
        q, gate = self._attention.write(self.qkv.forward(x), rotations, kv_cache, own)
        index_q = self._write_keys(x, rotations, kv_cache.index_keys, inputs)
        if self._attends_to_all(own, kv_cache.blocks.shape[3]):
            attended = paged_attention(q, kv_cache, own, self._spec.scale, self._attention.variant)
        else:
            attended = self._attend_sparsely(q, index_q, kv_cache, inputs, own)
        if gate is not None:
            attended = attended * sigmoid(gate.contiguous()).view(*q.shape[:2], -1)
        return self.output.forward_partial(attended.flatten(1))

    def _attends_to_all(self, inputs: AttentionInputs, block_size: int) -> bool:
        """Return whether no sequence can have more tokens than a query attends to."""
        lens = inputs.known_lens
        longest = inputs.block_tables.shape[1] * block_size if lens is None else max(lens, default=0)
        return longest <= self._most

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
        attended, most = torch.empty_like(q), self._most
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
            if own.generated is None:
                attended[early.tokens] = found
            else:
                is_prompt = torch.ones(len(q), dtype=torch.bool, device=q.device)
                is_prompt[own.generated.tokens] = False
                kept = is_prompt[early.tokens]
                attended[early.tokens[kept]] = found[kept]
        return attended

    def _attend(
        self, q: Tensor, index_q: Tensor, tile: Tile, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """Return the attention of a tile's queries to the blocks that they choose, [G T, Hq, D]."""
        assert kv_cache.index_keys is not None
        queries = index_q[tile.tokens].unflatten(0, tile.positions.shape)
        chosen, lens = self._choose(queries, tile, kv_cache.index_keys, inputs)
        num_kv_heads, block_size = kv_cache.blocks.shape[2:4]
        chosen, lens = chosen.expand(-1, num_kv_heads, -1), lens.expand(-1, num_kv_heads)
        rows = tile.sequences.repeat_interleave(tile.positions.shape[1])
        own_tables, piece_len = inputs.of_group(kv_cache.group).block_tables, gcd(self._block_len, block_size)
        places = chosen_tables(
            chosen, own_tables, rows, self._block_len // piece_len, block_size // piece_len
        )
        return block_attention(q, kv_cache.blocks, places, lens, self._spec.scale, piece_len)

    def _choose(
        self, q: Tensor, tile: Tile, cache: LayerCache, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the blocks that queries choose, [G T, H, K], and their tokens, [G T, H], for H or all KV heads.

        Args:
            q: [G, T, H, I], of the indexer.
            cache: of its keys.
        """
        sizes, block_size = self._sizes, cache.blocks.shape[3]
        tables = inputs.of_group(cache.group).block_tables[tile.sequences]
        keys = gather_index_keys(cache.blocks, tables[:, : -(-tile.length // block_size)])[:, : tile.length]
        scores = score_blocks(q, keys, tile.positions, sizes.block_len).flatten(0, 1)
        return choose_blocks(scores, tile.positions.flatten(), sizes.block_len, sizes.top_k, sizes.num_local)


class PooledKeysAttention(BlockSparseAttention, StateMixer):
    """Attention to blocks of keys that an indexer chooses for all heads by the blocks' mean keys (Qwen4, 2026).

    Every rank computes the whole indexer. A block's key is stored when the block is whole, in the block of the cache
    that has the last of its tokens.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: PooledKeysSpec, name: str) -> None:
        self._pooled = own.indexer
        super().__init__(load, spec, own.attention, name)

    def _read_indexer(self, load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str) -> None:
        sizes = self._pooled
        whole = Shard(0, 1, (sizes.num_heads + 1) * sizes.head_dim)
        self._index = ColumnParallelLinear(
            load,
            [Projection(f"{name}.index_qk_proj", whole)],
            spec.hidden_size,
            bias=False,
            shares_input=True,
        )
        self._q_norm, self._k_norm = (
            load.norm(f"{name}.{part}_layernorm", sizes.head_dim, spec.norms.offset) for part in ("q", "k")
        )

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        raise AssertionError("attention needs the cache beside its state")

    def _write_keys(
        self, x: Tensor, rotations: Rotations, cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """Write the keys of the blocks that the tokens end; return the queries, [T, Hi, I]."""
        assert inputs.states is not None
        dim, length = self._pooled.head_dim, self._block_len
        heads = self._index.forward(x).unflatten(1, (-1, dim))
        q = rms_norm(heads[:, :-1].contiguous(), self._q_norm, self._eps)
        cos, sin = rotations[self.rope]
        assert cos is not None
        assert sin is not None
        apply_rope(q, cos, sin)
        rows, lens = inputs.tokens_as_sequences(len(x))
        ends = whole_ends(inputs, len(x), length)
        rows, lens = rows[ends], lens[ends].long()
        is_whole = (lens % length == 0) & (lens > 0)
        kept = torch.cat((heads[:, -1], cos, sin), dim=1)
        runs, states = inputs.states.runs, inputs.states.layers[self.layer]
        windows = runs.compute(token_windows, kept, ends, states=states[0], by_token=False)
        means = windows[..., :dim].float().mean(dim=1, keepdim=True).to(x.dtype)
        keys = rms_norm(means, self._k_norm, self._eps)
        cos, sin = windows[:, 0, dim:].chunk(2, dim=1)
        apply_rope(keys, cos.contiguous(), sin.contiguous())
        block, place = entry_places((lens // length - 1).clamp(min=0), length, cache.blocks.shape[3])
        tables = inputs.of_group(cache.group).block_tables
        # Other keys go to block 0, as padding does.
        self._places(cache)[tables[rows, block].long() * is_whole, place] = keys[:, 0]
        return q

    def _places(self, cache: LayerCache) -> Tensor:
        """Return the keys in each block of the cache, [N, K, I]."""
        count, dim = self._pooled.blocks_in(cache.blocks.shape[3]), self._pooled.head_dim
        places: Tensor = cache.blocks.flatten(1)[:, : count * dim].unflatten(1, (count, dim))
        return places

    def _choose(
        self, q: Tensor, tile: Tile, cache: LayerCache, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the blocks that queries choose for all heads, [G T, 1, K], and their tokens, [G T, 1]."""
        tables, block_size = inputs.of_group(cache.group).block_tables[tile.sequences], cache.blocks.shape[3]
        count = tile.length // self._block_len
        keys = gather_entries(self._places(cache), tables, count, self._block_len, block_size)
        return choose_pooled_blocks(q, keys, tile.positions, self._block_len, self._pooled.top_k)


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
    ints = (to_device_once(np.array(values, np.int32), device) for values in (counts, lens))
    index_of = (to_device_once(np.array(values, np.int64), device) for values in (tokens, sequences))
    return EarlyChunks(*index_of, *ints)
