"""Rendezvous hashing (Thaler and Ravishankar, 1998): a weight for each pair of names. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def hash64(name: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name, digest_size=8).digest(), "little"))


def hashes_of(names: Iterable[str]) -> Hashes:
    """Return the hash of each name, [N]."""
    return np.array([hash64(name.encode()) for name in names], np.uint64)


def weights_of_pairs(left: Hashes, right: Hashes | np.uint64) -> Hashes:
    """Return the weight of each pair of hashes; the arrays are broadcast."""
    mixed = left ^ right
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed
