"""SharedKvSpec and CompressedSpec: attention of DeepSeek-V4 to single vectors, and to vectors of several tokens each.

Every layer attends to the last `window` tokens, each cached as one vector that is the key and the value of all
heads. A layer with a compressor attends besides to entries (proto.model.entries) of the same length.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .attention import FULL
from .state import StateSection, StateTensor


@dataclass(frozen=True, slots=True)
class SharedKvSpec:
    """Attention to one vector per token (DeepSeek-AI, *DeepSeek-V4*, 2026).

    Attributes:
        num_heads, head_dim: of queries; the vector of a token has `head_dim` elements, of which the last are rotated.
        query_rank: elements of the latent that queries are computed from.
        num_groups, group_rank: the results of each of so many groups of heads are projected to `group_rank` numbers,
            and those of all groups together to the output.
        window: tokens that a token attends to, itself included.
        rope: key of the rotary embedding in DecoderSpec.ropes.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    num_groups: int
    group_rank: int
    window: int
    rope: str = FULL

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class EntryIndexerSpec:
    """Sizes of the indexer that chooses the entries that a query attends to.

    Attributes:
        num_heads, head_dim: Hi heads, which share one key of I elements per entry.
        top_k: entries that a query attends to at most.
    """

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CompressedSpec(SharedKvSpec):
    """The same, and attention to entries. It keeps the last inputs of the compressors as a state.

    Attributes:
        rate: tokens per entry.
        overlaps: an entry is computed from twice as many tokens, half of them those of the entry before it.
        indexer: None for attention to all entries.
    """

    rate: int = 1
    overlaps: bool = False
    indexer: EntryIndexerSpec | None = None

    @property
    def cached_dim(self) -> int:
        """Elements of a token in a layer of the cache."""
        return self.head_dim

    @property
    def has_spaced_entries(self) -> bool:
        """False: the entries of a block are gathered."""
        return False

    @property
    def span(self) -> int:
        """Tokens that an entry is computed from."""
        return 2 * self.rate if self.overlaps else self.rate

    def compressed_dims(self) -> list[int]:
        """Return the elements of the entries that are computed, those of an indexer last."""
        return [self.head_dim] if self.indexer is None else [self.head_dim, self.indexer.head_dim]

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of each compressor, values and gates; every rank holds them in full."""
        lens = [2 * (2 if self.overlaps else 1) * dim for dim in self.compressed_dims()]
        return tuple(
            StateTensor("compressor", (self.span - 1, length), (StateSection(1, length),)) for length in lens
        )

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Do nothing: `check_shared_kv` checks layers with and without entries."""


def check_shared_kv(name: str, mixer: SharedKvSpec, num_ranks: int) -> None:
    """Raise ConfigError unless ranks get whole groups of heads."""
    if mixer.num_groups < 1 or mixer.num_heads % mixer.num_groups:
        raise ConfigError(
            f"{name}: its {mixer.num_heads} attention heads cannot be divided into {mixer.num_groups} groups "
            "(o_groups)"
        )
    if mixer.num_groups % num_ranks:
        raise ConfigError(
            f"{name}: tensor_parallel_size {num_ranks} does not divide the {mixer.num_groups} groups of its "
            "attention heads (o_groups)"
        )
