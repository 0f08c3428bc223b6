"""Shard: the part of a dimension that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a dimension that one of `size` ranks holds.

    If `size` does not divide the dimension, the last parts are shorter and are padded to `padded_len`.

    Attributes:
        multiple: all parts but the last have a multiple of this length.
    """

    rank: int
    size: int
    full_len: int
    multiple: int = 1

    @property
    def padded_len(self) -> int:
        return -(-self.full_len // (self.size * self.multiple)) * self.multiple

    @property
    def start(self) -> int:
        return min(self.rank * self.padded_len, self.full_len)

    @property
    def end(self) -> int:
        return min(self.start + self.padded_len, self.full_len)

    def __len__(self) -> int:
        return self.end - self.start
