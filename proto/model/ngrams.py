"""NgramSpec: embeddings of hashed n-grams that a layer adds to its residual (Qwen4, 2026)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..errors import ConfigError
from .state import StateSection, StateTensor

# Digits, in base 256, that a token id is kept as in a state: each is exact in every dtype of a model.
ID_DIGITS = 3
ID_BASE = 256
# Tensors of the state of n-grams, the last ones of their layer.
NUM_NGRAM_TENSORS = 2
# Of the published hash: Steele et al., *Fast Splittable Pseudorandom Number Generators* (SplitMix64), 2014.
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_SEED_STEP = 10007


@dataclass(frozen=True, slots=True)
class NgramSpec:
    """The n-grams that end at each token, of 2 to `size` tokens, and what a layer adds of them to each stream.

    Each n-gram is hashed several times, to the rows of a part of the table for each hash.

    Attributes:
        index: of the layer among those with n-grams, which have other hashes.
        num_hashes: of the n-grams of each length.
        min_rows: the parts of the table have as many rows as the primes from this number on.
        row_multiple: the table is padded to a multiple of so many rows.
        embed_dim: of all hashes together.
        vocab_size: of single tokens.
        separator: token that ends a text; n-grams do not go beyond it.
        width: taps of the convolution over time; they are `size` tokens apart.
        num_streams, hidden_size: of the residual.
    """

    index: int
    size: int
    num_hashes: int
    min_rows: int
    row_multiple: int
    embed_dim: int
    seed: int
    vocab_size: int
    separator: int
    width: int
    num_streams: int
    hidden_size: int

    @property
    def num_heads(self) -> int:
        """Parts of the table."""
        return (self.size - 1) * self.num_hashes

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    def head_rows(self) -> tuple[int, ...]:
        """Return the rows of each part of the table."""
        first = self.index * self.num_heads
        return _primes_from(self.min_rows, first + self.num_heads)[first:]

    @property
    def num_rows(self) -> int:
        """Rows of the table, with its padding."""
        return math.ceil(sum(self.head_rows()) / self.row_multiple) * self.row_multiple

    def multipliers(self) -> tuple[int, ...]:
        """Return the factor of each token of an n-gram, the last token's first; products have at most 63 bits."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab_size, 1) // 2)
        seed = self.seed + _SEED_STEP * self.index
        return tuple(2 * (_mix(seed + _GAMMA * place) % half) + 1 for place in range(1, self.size + 1))

    def state_tensors(self) -> tuple[StateTensor, ...]:
        """Return the ids of the last tokens, and the last inputs of the convolution, both in full on every rank."""
        num_inputs = self.num_streams * self.hidden_size
        return (
            StateTensor("tokens", (self.size - 1, ID_DIGITS), (StateSection(1, ID_DIGITS),)),
            StateTensor("ngrams", ((self.width - 1) * self.size, num_inputs), (StateSection(1, num_inputs),)),
        )

    def check(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless the table can be hashed to, and each rank gets some of its columns."""
        if self.size < 2 or self.num_hashes < 1 or self.width < 2 or self.row_multiple < 1:
            raise ConfigError(
                f"{name}: ngram_size, heads_per_ngram, ple_conv_kernel_size and make_ngram_vocab_size_divisible_by "
                f"are {self.size}, {self.num_hashes}, {self.width} and {self.row_multiple}, must be at least 2, 1, 2 "
                "and 1"
            )
        if self.embed_dim < 1 or self.embed_dim % self.num_heads:
            raise ConfigError(
                f"{name}: ple_embed_dim is {self.embed_dim}, must be a multiple of the {self.num_heads} hashes of "
                "n-grams"
            )
        if self.vocab_size >= ID_BASE**ID_DIGITS:
            raise ConfigError(
                f"{name}: vocab_size is {self.vocab_size}, must be less than {ID_BASE**ID_DIGITS} with n-grams"
            )
        if -(-self.head_dim // num_ranks) * (num_ranks - 1) >= self.head_dim:
            raise ConfigError(
                f"{name}: the {self.head_dim} columns of its table of n-grams are too few for a tensor_parallel_size "
                f"of {num_ranks}"
            )


def _mix(value: int) -> int:
    """Return the hash of a number by SplitMix64."""
    value = (value + _GAMMA) & _MASK
    for shift, factor in _FACTORS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=16)
def _primes_from(start: int, count: int) -> tuple[int, ...]:
    """Return the first primes that are not smaller than a number."""
    found, number = list[int](), max(start, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)
