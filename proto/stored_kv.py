"""Stored KV: the scheduler's orders to write blocks to files and to read them, and the ranks' reports.

Each rank keeps its part of every block in files of its own, in up to two tiers: a directory of the host and a shared
one. An order names host blocks, from which the ranks write and into which they read, on threads of their own while
steps go on. Until all ranks have reported an order, its host blocks are held.

Snapshots of states are stored in the same way: their keys have a group of their own, and stand for slots in host
memory where others stand for host blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .block_tables import IntArray
from .codec import NO_INTS
from .later_fields import sent_if_set

# Of a block: its cache group and the digest of the chain of tokens up to its end.
KEY_BYTES = 4 + 32
# Group of the states of a model whose layers keep one of each sequence.
STATE_GROUP = (1 << 32) - 1
# The tiers, by number, as events and metrics name them.
TIERS = ("disk", "shared")
_STATE_PREFIX = STATE_GROUP.to_bytes(4, "little")


def block_key(group: int, digest: bytes) -> bytes:
    """Return the name of a block, or of a state, among those of one layout."""
    return group.to_bytes(4, "little") + digest


def is_state(key: bytes) -> bool:
    """Return whether a key is of a state."""
    return key.startswith(_STATE_PREFIX)


def split_keys(raw: bytes) -> list[bytes]:
    """Return the keys that follow each other in a field of an order or report."""
    return [raw[start : start + KEY_BYTES] for start in range(0, len(raw), KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """An order to write host blocks to every tier, or to read them from any.

    Attributes:
        order_id: the scheduler's number for it, which is never used again in an epoch.
        keys: the keys of the blocks, one after the other.
        host_blocks: [n], slots in host memory for keys of states.
    """

    order_id: int
    is_read: bool
    keys: bytes
    host_blocks: IntArray


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A rank's news of one tier, or the end of an order.

    Attributes:
        tier: number of the tier.
        order_id: the order that has ended; 0 for none.
        failed: [n] positions of the blocks of the order that were not read, or written to no tier.
        num_corrupt: the number of these blocks whose content was not what its name says.
        num_bytes, seconds: of the order's blocks that did not fail, and its time from its begin.
        added, removed: keys of blocks that this rank has found or written, and has no more, in the tier.
        is_whole: the rank has now reported all that it found in the tier at its start.
        tier_bytes: of all files in the tier's directory, as last counted; 0 if it was not counted since.
    """

    rank: int
    tier: int = 0
    order_id: int = 0
    failed: IntArray = sent_if_set(NO_INTS)
    num_corrupt: int = sent_if_set(0)
    num_bytes: int = sent_if_set(0)
    seconds: float = sent_if_set(0.0)
    added: bytes = sent_if_set(b"")
    removed: bytes = sent_if_set(b"")
    is_whole: bool = sent_if_set(False)
    tier_bytes: int = sent_if_set(0)
