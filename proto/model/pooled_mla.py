"""PooledMlaSpec: latent attention to pools of successive tokens, which an indexer chooses (GLM-5 Next, 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from .mla import MlaSpec
from .state import StateTensor


@dataclass(frozen=True, slots=True)
class PooledMlaSpec(MlaSpec):
    """Latent attention of a layer with an indexer of pools (IndexerSpec.pool_len).

    The key of a pool is an entry (proto.model.entries): a sum of the keys of its tokens, with the softmax of their
    gates in each element as weights. The keys and gates of the last tokens are a state of the sequence.
    """

    @property
    def rate(self) -> int:
        """Tokens of a pool."""
        assert self.indexer is not None
        return self.indexer.pool_len

    @property
    def cached_dim(self) -> int:
        """Elements of a token in a layer of the cache."""
        return self.attended_dim

    @property
    def has_spaced_entries(self) -> bool:
        """True: the op that scores keys of tokens reads those of pools."""
        return True

    def compressed_dims(self) -> list[int]:
        """Return the elements of the key of a pool."""
        assert self.indexer is not None
        return [self.indexer.head_dim]

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the keys and gates of the last tokens; every rank holds them in full."""
        assert self.indexer is not None
        return (StateTensor("pool", (self.rate - 1, 2 * self.indexer.head_dim)),)

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Do nothing: the heads are checked as those of all attention."""
