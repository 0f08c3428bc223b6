"""SharedKvAttention and CompressedAttention: attention of DeepSeek-V4; see proto.model.compressed.

The cached vector of a token is rotated, and is key and value at once. So results are rotated back by the position of
their query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.linear import linear, pack
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.shared_attention import (
    choose_entries,
    entry_places,
    gather_entries,
    gather_tokens,
    rotate_last,
    shared_attention,
    token_windows,
)
from ....kernels.state_runs import StateRuns
from ....proto.model.compressed import CompressedSpec, SharedKvSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache
from ...comm.shard import Shard
from ...weights.weight_slice import WeightSlice
from ..layers import ColumnParallelLinear, PartialSum, Projection, RotaryTable, Rotations, RowParallelLinear
from ..load_context import LoadContext
from .pages import Pages
from .query_tiles import Tile, query_tiles, whole_ends
from .state_mixer import StateMixer


class SharedKvAttention:
    """Attention to the last tokens; each rank computes whole groups of heads, and caches all vectors."""

    qkv: ColumnParallelLinear
    rope: str | None

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: SharedKvSpec, name: str) -> None:
        self.spec, self.rope, self._eps = own, own.rope, spec.norm_eps
        whole = [(f"{name}.q_a_proj", own.query_rank), (f"{name}.kv_proj", own.head_dim)]
        whole += self._further_projections(name)
        self._lens = [length for _, length in whole]
        self.qkv = ColumnParallelLinear(
            load,
            [Projection(stored, Shard(0, 1, length)) for stored, length in whole],
            spec.hidden_size,
            bias=False,
            shares_input=True,
        )
        queries = Projection(f"{name}.q_b_proj", load.shard(own.num_heads * own.head_dim))
        self._queries = ColumnParallelLinear(load, [queries], own.query_rank, bias=False)
        self._latent_norm = load.norm(f"{name}.q_a_norm", own.query_rank)
        self._norm = load.norm(f"{name}.kv_norm", own.head_dim)
        self._ones = load.empty(own.head_dim).fill_(1)
        self._sinks = load.part(f"{name}.sinks", load.shard(own.num_heads)).float()
        groups, group_len = load.shard(own.num_groups), own.num_heads * own.head_dim // own.num_groups
        shape = own.num_groups * own.group_rank, group_len
        self._groups = [
            load.linear([WeightSlice(f"{name}.o_a_proj", shape, 0, group * own.group_rank, own.group_rank)])
            for group in range(groups.start, groups.end)
        ]
        self.output = RowParallelLinear(
            load, f"{name}.o_b_proj", own.num_groups * own.group_rank, spec.hidden_size, bias=False
        )

    def _further_projections(self, name: str) -> list[tuple[str, int]]:
        """Return names and outputs of further projections of the input."""
        return []

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens' vectors and entries to the cache before attention reads them."""
        assert isinstance(x, Tensor)  # the input is shared
        own, (cos, sin) = self.spec, rotations[self.rope]
        assert cos is not None
        assert sin is not None
        latent, vectors, *further = self.qkv.forward(x).split(self._lens, dim=1)
        latent = rms_norm(latent.contiguous(), self._latent_norm, self._eps)
        q = self._queries.forward(latent).view(len(x), -1, own.head_dim)
        q = rotate_last(rms_norm(q, self._ones, self._eps), cos, sin)
        vectors = rms_norm(vectors.contiguous(), self._norm, self._eps)
        of_cache = inputs.of_group(kv_cache.group)
        block_size, slots = kv_cache.blocks.shape[3], of_cache.slot_mapping.clamp(min=0)  # padding in block 0
        stored = rotate_last(vectors[:, None], cos, sin)[:, 0]
        kv_cache.blocks[slots // block_size, 0, 0, slots % block_size] = stored
        self._compress(further, inputs)
        out = torch.empty_like(q)
        choice = self._prepare_choice(x, latent, cos, sin)
        for tile in query_tiles(inputs, block_size):
            keys, visible = self._window(tile, kv_cache, of_cache.block_tables)
            entries, chosen = self._entries(tile, choice, inputs)
            if entries is not None and chosen is not None:
                keys, visible = torch.cat((keys, entries), 1), torch.cat((visible, chosen), 2)
            queries = q[tile.tokens].unflatten(0, tile.positions.shape)
            attended = shared_attention(queries, keys, visible, self._sinks, own.scale, own.head_dim)
            out[tile.tokens] = attended.flatten(0, 1)
        grouped = rotate_last(out, cos, sin, back=True).flatten(1).chunk(len(self._groups), dim=1)
        projected = [own.multiply(part.contiguous()) for own, part in zip(self._groups, grouped, strict=True)]
        return self.output.forward_partial(torch.cat(projected, dim=1))

    def _window(self, tile: Tile, kv_cache: LayerCache, block_tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of the tokens that a tile may attend to, [G, L, D], and which each query does."""
        window, first = self.spec.window, tile.positions[:, :1]
        length = min(tile.length, window + tile.positions.shape[1] - 1)
        back = torch.arange(1 - length, 1, device=first.device)
        positions = tile.positions[:, -1:] + back
        keys = gather_tokens(kv_cache.blocks, block_tables[tile.sequences], positions)
        distance = tile.positions[:, :, None] - positions[:, None]
        return keys, (distance >= 0) & (distance < window) & (positions[:, None] >= 0)

    def _compress(self, projected: Sequence[Tensor], inputs: AttentionInputs) -> None:
        """Store the entries that the step's tokens complete."""

    def _prepare_choice(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the queries and weights of the indexer for all of the step's tokens; None without one."""
        return None

    def _entries(
        self, tile: Tile, choice: tuple[Tensor, Tensor] | None, inputs: AttentionInputs
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the entries of a tile's sequences, [G, L, D], and which each query attends to; None for none."""
        return None, None


class Compressor:
    """Makes entries of adjacent tokens: sums of their values, weighted by a softmax of their gates.

    Args:
        dim: D, elements of an entry.
        name: of the compressor in the checkpoint.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, own: CompressedSpec, dim: int, name: str
    ) -> None:
        self._own, self._dim, self._eps = own, dim, spec.norm_eps
        num_series = 2 if own.overlaps else 1
        self._bias = torch.empty(own.rate, num_series * dim, dtype=torch.float32, device=load.device)
        load.checkpoint.read_into(self._bias, f"{name}.position_bias", tuple(self._bias.shape))
        self._norm = load.norm(f"{name}.kv_norm", dim)

    def pool(self, windows: Tensor, ends: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return entries, [n, D].

        Args:
            windows: [n, K, 2 S D], values and gates of the tokens of S series.
            ends: [n] int64, tokens of the sequence up to the last of the window.
            cos, sin: [n, R], of the first token of the entry.
        """
        own, dim = self._own, self._dim
        values, gates = windows.chunk(2, dim=2)
        if own.overlaps:
            # The first series of the tokens before, and the second one of the entry's own.
            values, before, after = (
                torch.cat((values[:, : own.rate, :dim], values[:, own.rate :, dim:]), dim=1),
                gates[:, : own.rate, :dim].float() + self._bias[:, :dim],
                gates[:, own.rate :, dim:].float() + self._bias[:, dim:],
            )
            before = before.masked_fill((ends == own.rate)[:, None, None], -torch.inf)
            gates = torch.cat((before, after), dim=1)
        else:
            gates = gates.float() + self._bias
        pooled = (values * gates.softmax(dim=1).to(values.dtype)).sum(dim=1)
        return rotate_last(rms_norm(pooled, self._norm, self._eps)[:, None], cos, sin)[:, 0]


class CompressedAttention(SharedKvAttention, StateMixer):
    """Attention to the last tokens and to entries, of which an indexer may choose some.

    Every rank computes all entries and the whole indexer.
    """

    spec: CompressedSpec

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: CompressedSpec, name: str) -> None:
        self.spec = own
        super().__init__(load, spec, own, name)
        names = [f"{name}.compressor", f"{name}.compressor.indexer"]
        self._compressors = [
            Compressor(load, spec, own, dim, stored)
            for dim, stored in zip(own.compressed_dims(), names, strict=False)
        ]
        self._index_queries: ColumnParallelLinear | None = None
        if (indexer := own.indexer) is not None:
            queries = Projection(f"{names[1]}.q_b_proj", Shard(0, 1, indexer.num_heads * indexer.head_dim))
            self._index_queries = ColumnParallelLinear(load, [queries], own.query_rank, bias=False)
            shape = indexer.num_heads, spec.hidden_size
            weights = load.matrix(
                WeightSlice(f"{names[1]}.scorer.weights_proj", shape, 0, 0, shape[0]), torch.float32
            )
            # Of the mean over heads, and of the products.
            self._index_weights = pack(weights.mul_((indexer.num_heads * indexer.head_dim) ** -0.5))

    def attach(self, pages: Pages, number: int, rotary: RotaryTable) -> None:
        """Set where entries are stored, and how they are rotated.

        Args:
            number: of the layer among those with entries.
        """
        self._pages, self._number, self._rotary = pages, number, rotary

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        raise AssertionError("attention to entries needs the cache beside its state")

    def _further_projections(self, name: str) -> list[tuple[str, int]]:
        parts, series = ["compressor", "compressor.indexer"], 2 if self.spec.overlaps else 1
        return [
            (f"{name}.{part}.{half}_proj", series * dim)
            for part, dim in zip(parts, self.spec.compressed_dims(), strict=False)
            for half in ("kv", "gate")
        ]

    def _compress(self, projected: Sequence[Tensor], inputs: AttentionInputs) -> None:
        assert inputs.states is not None
        own, runs, states = self.spec, inputs.states.runs, inputs.states.layers[self.layer]
        rows, lens = inputs.tokens_as_sequences(len(projected[0]))
        ends = whole_ends(inputs, len(lens), own.rate)
        rows, lens = rows[ends], lens[ends].long()
        completes = (lens % own.rate == 0) & (lens > 0)
        cos, sin = self._rotary.at((lens - own.rate).clamp(min=0))
        block, place = entry_places((lens // own.rate - 1).clamp(min=0), own.rate, self._pages.block_size)
        for index, (compressor, cache) in enumerate(
            zip(self._compressors, self._pages.layers[self._number], strict=True)
        ):
            x = torch.cat((projected[2 * index], projected[2 * index + 1]), dim=1)
            windows = runs.compute(token_windows, x, ends, states=states[index], by_token=False)
            tables = inputs.of_group(cache.group).block_tables
            blocks = tables[rows, block].long() * completes  # other entries go to block 0, as padding does
            cache.entries[blocks, place] = compressor.pool(windows, lens, cos, sin)

    def _prepare_choice(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        if self._index_queries is None or self.spec.indexer is None:
            return None
        q = self._index_queries.forward(latent).unflatten(1, (-1, self.spec.indexer.head_dim))
        return rotate_last(q, cos, sin), linear(x.float(), self._index_weights)

    def _entries(
        self, tile: Tile, choice: tuple[Tensor, Tensor] | None, inputs: AttentionInputs
    ) -> tuple[Tensor | None, Tensor | None]:
        own, count = self.spec, tile.length // self.spec.rate
        if not count:
            return None, None
        found = [
            gather_entries(
                cache.entries,
                inputs.of_group(cache.group).block_tables[tile.sequences],
                count,
                own.rate,
                self._pages.block_size,
            )
            for cache in self._pages.layers[self._number]
        ]
        counts = (tile.positions + 1) // own.rate
        if choice is None or own.indexer is None:
            return found[0], torch.arange(count, device=counts.device) < counts.unsqueeze(-1)
        q, weights = (part[tile.tokens].unflatten(0, tile.positions.shape) for part in choice)
        return found[0], choose_entries(q, weights, found[1], counts, own.indexer.top_k)
