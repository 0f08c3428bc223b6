"""PooledMlaAttention: latent attention to pools of successive tokens; see proto.model.pooled_mla."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.linear import linear, pack
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.shared_attention import entry_places, token_windows
from ....kernels.sparse_latent import choose_tokens, index_scores
from ....kernels.state_runs import StateRuns
from ....proto.model.mla import MlaSpec
from ....proto.model.pooled_mla import PooledMlaSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache
from ..layers import PartialSum, RotaryTable, Rotations
from ..load_context import LoadContext
from .indexer import Indexer
from .mla import MlaAttention
from .pages import EntryCache, Pages
from .query_tiles import whole_ends
from .state_mixer import StateMixer


class PooledIndexer(Indexer):
    """The indexer of a layer, whose keys are those of pools."""

    def __init__(self, load: LoadContext, hidden_size: int, mla: MlaSpec, name: str) -> None:
        super().__init__(load, hidden_size, mla, name)
        shape = self._sizes.head_dim, hidden_size
        self._gates = pack(load.replicated(f"{name}.index_kpool_compress_gate", *shape))
        self._bias = torch.empty(
            self._sizes.pool_len, self._sizes.head_dim, dtype=torch.float32, device=load.device
        )
        load.checkpoint.read_into(self._bias, f"{name}.index_kpool_compress_ape", tuple(self._bias.shape))
        self._pages: Pages | None = None
        self._number = 0

    def attach(self, pages: Pages, number: int) -> None:
        """Set where the keys are stored; see PooledMlaAttention.attach."""
        self._pages, self._number = pages, number

    @property
    def _cache(self) -> EntryCache:
        assert self._pages is not None
        (found,) = self._pages.layers[self._number]
        return found

    def write(self, x: Tensor, inputs: AttentionInputs, states: Tensor, runs: StateRuns) -> None:
        """Store the keys of the pools that the step's tokens complete.

        Keys of incomplete pools, of recorded steps, are stored in block 0, which no sequence has.

        Args:
            x: [T, E].
            states: [num_slots, pool_len - 1, 2 I].
        """
        assert self._pages is not None
        pool_len, cache = self._sizes.pool_len, self._cache
        projected = torch.cat((self._norm.apply(self._keys.forward(x)), linear(x, self._gates)), dim=1)
        rows, lens = inputs.tokens_as_sequences(len(x))
        ends = whole_ends(inputs, len(x), pool_len)
        rows, lens = rows[ends], lens[ends].long()
        windows = runs.compute(token_windows, projected, ends, states=states, by_token=False)
        completes = (lens % pool_len == 0) & (lens > 0)
        block, place = entry_places((lens // pool_len - 1).clamp(min=0), pool_len, self._pages.block_size)
        blocks = inputs.of_group(cache.group).block_tables[rows, block].long() * completes
        cache.entries[blocks, place] = self._pool(windows)

    def _pool(self, windows: Tensor) -> Tensor:
        """Return the keys of pools from the keys and gates of their tokens, [n, pool_len, 2 I] -> [n, I]."""
        keys, gates = windows.chunk(2, dim=2)
        weights = (gates.float() + self._bias).softmax(dim=1)
        return (weights.to(keys.dtype) * keys).sum(dim=1)

    def _project(self, x: Tensor, q_latent: Tensor, rotations: Rotations) -> Tensor:
        q: Tensor = self._queries.forward(q_latent).unflatten(1, (-1, self._sizes.head_dim))
        return q

    def _mark(
        self,
        q: Tensor,
        weights: Tensor,
        rows: Tensor,
        lens: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        pool_len, cache, block_size = self._sizes.pool_len, self._cache, kv_cache.blocks.shape[3]
        tables = inputs.of_group(cache.group).block_tables
        width = tables.shape[1] * block_size
        if pool_len > block_size:  # the last of its blocks has the key of a pool
            step = pool_len // block_size
            tables = tables[:, step - 1 :: step].contiguous()
        counts, num_pools = lens // pool_len, self._sizes.top_k // pool_len
        keys = cache.entries[:, None, None]
        scores = index_scores(q, weights, keys, tables, rows, counts, num_pools)
        chosen = choose_tokens(scores, counts, num_pools).repeat_interleave(pool_len, dim=1)
        positions, ends = torch.arange(width, device=lens.device), lens.unsqueeze(1)
        is_last = (positions >= counts.unsqueeze(1) * pool_len) & (positions < ends)
        return F.pad(chosen, (0, width - chosen.shape[1])) | is_last


class PooledMlaAttention(MlaAttention, StateMixer):
    """Latent attention with an indexer of pools of its own; every rank computes the whole indexer."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, sizes: PooledMlaSpec, name: str) -> None:
        super().__init__(load, spec, sizes, name)

    def make_indexer(self, load: LoadContext, hidden_size: int, sizes: MlaSpec, name: str) -> PooledIndexer:
        """Return the indexer of the layer."""
        return PooledIndexer(load, hidden_size, sizes, name)

    def attach(self, pages: Pages, number: int, rotary: RotaryTable) -> None:
        """Set where the keys of pools are stored.

        Args:
            number: of the layer among those with entries.
            rotary: of the layer, which rotates none of them.
        """
        assert isinstance(self.indexer, PooledIndexer)
        self.indexer.attach(pages, number)

    def index_keys(
        self, indexer: Indexer, x: Tensor, cos: Tensor, sin: Tensor, inputs: AttentionInputs
    ) -> Tensor | None:
        """Store the keys of pools. Returns None: no keys stand behind the latents."""
        assert isinstance(indexer, PooledIndexer)
        assert inputs.states is not None
        (states,) = inputs.states.layers[self.layer]
        indexer.write(x, inputs, states, inputs.states.runs)
        return None

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        raise AssertionError("attention to latents needs the cache beside its state")
