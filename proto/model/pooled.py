"""PooledKeysSpec: attention to blocks of keys that an indexer chooses by their mean keys (Qwen4, 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .attention import AttentionSpec, PooledIndexerSpec
from .state import StateSection, StateTensor


@dataclass(frozen=True, slots=True)
class PooledKeysSpec:
    """Attention with an indexer of pooled keys, which keeps the indexer's keys of the last tokens as a state.

    The mean of a block's keys is rotated as the first of its tokens is, so that a token's state has its cosines and
    sines, too.

    Attributes:
        attention: to the chosen keys; has a PooledIndexerSpec.
        num_rotated: numbers of a head that are rotated.
    """

    attention: AttentionSpec
    num_rotated: int

    @property
    def indexer(self) -> PooledIndexerSpec:
        assert isinstance(self.attention.indexer, PooledIndexerSpec)
        return self.attention.indexer

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return keys, cosines and sines of the tokens of a block but its last; every rank holds them in full."""
        num_kept = self.indexer.head_dim + 2 * self.num_rotated
        shape = self.indexer.block_len - 1, num_kept
        return (StateTensor("keys", shape, (StateSection(1, num_kept),)),)

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Do nothing: the heads are checked as those of other attention."""


def check_key_places(name: str, mixers: Sequence[object], block_size: int) -> None:
    """Raise ConfigError if blocks of the cache of this size have no room for the keys of the blocks in them."""
    for indexer in {mixer.indexer for mixer in mixers if isinstance(mixer, PooledKeysSpec)}:
        heads, dim = indexer.cached
        if indexer.blocks_in(block_size) * indexer.head_dim > 2 * heads * dim * block_size:
            raise ConfigError(
                f"{name}: block_size is {block_size}, which has no room for the mean keys of {indexer.block_len} "
                "tokens each (indexer_compress_ratio); use 16"
            )
