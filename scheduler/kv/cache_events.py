"""CacheEvents: the full blocks that prefix caches take in and evict, in order, for routers outside of quire.

A block that moves to a lower memory is stored there before it is removed above: a router forgets the tokens of a
block that no memory has, and events of lower memories do not repeat them.

A gateway of quire follows the `CacheJournal` instead, whose reports are smaller and name no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...proto.digests import media_of_block
from ..sequences.sequence import Sequence
from .cache_journal import CacheJournal

# Content of a cached block: its digest, the digest of the chain before it, and its int32 tokens, a full block or
# fewer.
CacheKey = tuple[bytes, bytes, bytes]

_TOKEN_BYTES = 4

# Memories that hold blocks, by the names that routers of vLLM's events know.
DEVICE_MEDIUM = "GPU"
HOST_MEDIUM = "CPU"
# Those of stored_kv.TIERS. Events of blocks that a server finds in files at its start name no tokens.
STORED_MEDIA = ("DISK", "SHARED")


@dataclass(slots=True)
class BlocksStored:
    """Blocks of one chain that were added to a prefix cache.

    Attributes:
        digests: of the blocks, each the parent of the next one.
        parent: digest of the block before the first; None if a sequence begins there, or it is not known.
        tokens: int32 tokens of all blocks; empty for blocks whose tokens an earlier event of their digests has.
        lora_name: the adapter that the blocks were computed with.
        root: start of the chain, if other tenants, salts or adapters have other blocks for the same tokens.
        media: for each block the digests of the images that it touches, in order; empty if no block has any.
        partition: of the pool.
    """

    digests: list[bytes]
    medium: str
    partition: int
    parent: bytes | None = None
    tokens: bytearray | bytes = b""
    lora_name: str | None = None
    root: bytes | None = None
    media: list[tuple[bytes, ...]] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that were removed from a prefix cache."""

    digests: list[bytes]
    medium: str
    partition: int


CacheEvent = BlocksStored | BlocksRemoved


class CacheEvents:
    """The events since the last `take`; those of blocks that follow each other are one event."""

    is_on = True

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def add_stored(self, key: CacheKey, sequence: Sequence, index: int, partition: int) -> None:
        """Record that block `index` of a sequence was added on the device; it has the digests of those before."""
        digest, parent, tokens = key
        media = list[tuple[bytes, ...]]()
        if sequence.media:  # then the key's parent may have images in it
            parent = sequence.block_digests[index - 1] if index else sequence.root
            block_size = len(tokens) // _TOKEN_BYTES
            media = [tuple(item.digest for item in media_of_block(sequence.media, index, block_size))]
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlocksStored)
            and isinstance(last.tokens, bytearray)
            and last.digests[-1] == parent
            and last.partition == partition
            and len(last.media) == (len(last.digests) if media else 0)
        ):
            last.digests.append(digest)
            last.tokens += tokens
            last.media += media
            return
        self._events.append(
            BlocksStored(
                [digest],
                DEVICE_MEDIUM,
                partition,
                parent=None if parent == sequence.root else parent,
                tokens=bytearray(tokens),
                lora_name=None if sequence.lora is None else sequence.lora.name,
                root=None if sequence.has_common_root else sequence.root,
                media=media,
            )
        )

    def add_stored_below(self, digest: bytes, medium: str, partition: int) -> None:
        """Record that a block was added in host memory or files."""
        self._events.append(BlocksStored([digest], medium, partition))

    def add_removed(self, digest: bytes, medium: str, partition: int) -> None:
        """Record that a block was removed from a memory."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and (last.medium, last.partition) == (medium, partition):
            last.digests.append(digest)
        else:
            self._events.append(BlocksRemoved([digest], medium, partition))

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


class NoCacheEvents(CacheEvents):
    """Events that nobody reads: nothing is recorded."""

    is_on = False

    def add_stored(self, key: CacheKey, sequence: Sequence, index: int, partition: int) -> None:
        pass

    def add_stored_below(self, digest: bytes, medium: str, partition: int) -> None:
        pass

    def add_removed(self, digest: bytes, medium: str, partition: int) -> None:
        pass


class TierLog:
    """A tier's changes for the journal, and for the events what only the prefix cache knows of.

    Blocks that are added on the device are events of `BlockManager`, which knows their sequences.
    """

    def __init__(self, journal: CacheJournal, events: CacheEvents, medium: str, partition: int) -> None:
        self._journal, self._events = journal, events
        self._medium, self._partition = medium, partition

    def add(self, digests: list[bytes]) -> None:
        self._journal.add(digests)
        if self._medium == HOST_MEDIUM:
            for digest in digests:
                self._events.add_stored_below(digest, HOST_MEDIUM, self._partition)

    def remove(self, digest: bytes) -> None:
        self._journal.remove(digest)
        self._events.add_removed(digest, self._medium, self._partition)


def tier_log(
    journal: CacheJournal, events: CacheEvents, medium: str, partition: int
) -> CacheJournal | TierLog:
    """Return the log of the first cache group of a partition in one tier."""
    return TierLog(journal, events, medium, partition) if events.is_on else journal
