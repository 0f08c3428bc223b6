"""PrefixCache: finds blocks that hold the KV of a prompt's beginning.

Blocks are found by chained digests (`proto/digests.py`). Those that agree with a prompt only in their first tokens
are found as well (`closest_child`), and are copied. So the last, partly filled block of a conversation serves its
next turn.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from math import ceil

from ...proto.digests import DIGEST_BYTES, child_digest, parent_with_media
from ..sequences.sequence import Sequence
from .cache_events import CacheEvents, CacheKey, TierLog, tier_log
from .cache_journal import CacheJournal

# A partial match is copied if it covers at least this share of a block.
MIN_PARTIAL_SHARE = 0.25
# Blocks compared for a partial match: bounds the lookup time of popular prefixes.
MAX_CHILDREN_COMPARED = 8


class PrefixCache:
    """digest |-> block. Holds no references: on a hit the caller takes one.

    Args:
        block_size: tokens per block.
        journal: records each full block that is added or removed; None for no record.
    """

    def __init__(self, block_size: int, journal: CacheJournal | TierLog | None = None) -> None:
        self.block_size = block_size
        self._full_width = DIGEST_BYTES + 4 * block_size
        self._journal = journal
        self._block_of: dict[bytes, int] = {}
        # The content of each cached block: its digest, and its parent's digest followed by its tokens. Two dicts of
        # bytes, which the garbage collector never visits: it visits a dict whole in the collection, of any
        # generation, after a tuple was put into it.
        self._digest_of: dict[int, bytes] = {}
        self._content_of: dict[int, bytes] = {}
        # parent digest + the fewest tokens of a partial match |-> its block, or its blocks, the oldest first. All
        # prompts of a model begin with the same token, and all with one system prompt continue the same block: the
        # blocks of an OrderedDict are added, removed and read from its start in O(1).
        self._children: dict[bytes, int | OrderedDict[int, None]] = {}
        self._min_common = ceil(MIN_PARTIAL_SHARE * block_size)
        self._child_width = DIGEST_BYTES + 4 * self._min_common

    def __len__(self) -> int:
        return len(self._digest_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digest_of

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Append the digests that a sequence lacks for the first `num_blocks` full blocks of its tokens."""
        if len(sequence.block_digests) < num_blocks:
            self.extend_chain(sequence, sequence.block_digests, sequence.token_ids, num_blocks)

    def extend_chain(
        self, sequence: Sequence, digests: list[bytes], token_ids: array[int], num_blocks: int
    ) -> None:
        """Append the digests that a sequence's chain lacks for the first `num_blocks` full blocks of `token_ids`."""
        raw, width = memoryview(token_ids).cast("B"), 4 * self.block_size
        parent, media = digests[-1] if digests else sequence.root, sequence.media
        for index in range(len(digests), num_blocks):
            if media:
                parent = parent_with_media(parent, media, index, self.block_size)
            parent = child_digest(parent, raw[index * width : (index + 1) * width])
            digests.append(parent)

    def find(self, digest: bytes) -> int | None:
        """Return the block with that chain digest, or None."""
        return self._block_of.get(digest)

    def closest_child(self, parent: bytes, tokens: array[int]) -> tuple[int, int] | None:
        """Return the block after `parent` with the most first tokens in common with `tokens`: (block, count).

        Returns None if no block has MIN_PARTIAL_SHARE of its tokens in common. Among more than MAX_CHILDREN_COMPARED
        blocks with so many common tokens, the oldest are compared.
        """
        raw = tokens.tobytes()
        found = self._children.get((parent + raw)[: self._child_width], ())
        children = (found,) if isinstance(found, int) else found
        best: tuple[int, int] | None = None
        for block_id in islice(children, MAX_CHILDREN_COMPARED):
            count = _common_tokens(raw, self._content_of[block_id][DIGEST_BYTES:])
            if count >= self._min_common and (best is None or count > best[1]):
                best = block_id, count
        return best

    def insert(self, key: CacheKey, block_id: int) -> bool:
        """Add a block. Returns False if a block with the same content is cached already."""
        digest, parent, tokens = key
        return bool(self.insert_all([digest], [parent + tokens], [block_id]))

    def insert_all(self, digests: list[bytes], contents: list[bytes], block_ids: list[int]) -> list[int]:
        """Add distinct blocks; return the positions of those whose content was not cached already.

        Args:
            contents: of each block, the digest of its parent and its tokens.
        """
        # A step of 4,096 rows adds 256 blocks, and a loop over them would run more instructions.
        block_of, cached, children, width = self._block_of, self._digest_of, self._children, self._child_width
        is_new = [digest not in block_of for digest in digests]
        added = {
            digest: at for at, digest in enumerate(digests) if is_new[at] and block_ids[at] not in cached
        }
        places = list(added.values())
        block_ids, contents = [block_ids[at] for at in places], [contents[at] for at in places]
        block_of.update(zip(added, block_ids, strict=True))
        cached.update(zip(block_ids, added, strict=True))
        self._content_of.update(zip(block_ids, contents, strict=True))
        for block_id, child in zip(block_ids, [content[:width] for content in contents], strict=True):
            others = children.setdefault(child, block_id)
            if isinstance(others, OrderedDict):
                others[block_id] = None
            elif others != block_id:
                children[child] = OrderedDict.fromkeys((others, block_id))
        if self._journal is not None:
            full_width, filled = self._full_width, zip(added, contents, strict=True)
            self._journal.add([digest for digest, content in filled if len(content) == full_width])
        return places

    def key_of(self, block_id: int) -> CacheKey:
        """Return the content of a cached block."""
        content = self._content_of[block_id]
        return self._digest_of[block_id], content[:DIGEST_BYTES], content[DIGEST_BYTES:]

    def forget(self, block_id: int) -> None:
        """Remove a block: its content is evicted."""
        digest = self._digest_of.pop(block_id)
        content = self._content_of.pop(block_id)
        del self._block_of[digest]
        child = content[: self._child_width]
        others = self._children[child]
        if not isinstance(others, int):
            del others[block_id]
        if isinstance(others, int) or not others:
            del self._children[child]
        if self._journal is not None and len(content) == self._full_width:
            self._journal.remove(digest)

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove those of the blocks that are cached."""
        for block_id in block_ids:
            if block_id in self._digest_of:
                self.forget(block_id)

    def clear(self) -> None:
        """Remove every block."""
        for block_id in list(self._digest_of):
            self.forget(block_id)

    def full_digests(self) -> list[bytes]:
        """Return the digests of all cached full blocks."""
        content_of, full_width = self._content_of, self._full_width
        return [digest for block, digest in self._digest_of.items() if len(content_of[block]) == full_width]

    def check_integrity(self) -> None:
        """Raise AssertionError unless all maps agree."""
        blocks, children = dict[bytes, int](), dict[bytes, list[int]]()
        for block_id in self._digest_of:
            digest, parent, tokens = self.key_of(block_id)
            assert digest == child_digest(parent, tokens), "a cached block has another block's digest"
            blocks[digest] = block_id
            children.setdefault((parent + tokens)[: self._child_width], []).append(block_id)
        assert blocks == self._block_of, "the prefix cache's digests disagree with its blocks"
        listed = {
            child: [blocks] if isinstance(blocks, int) else list(blocks)
            for child, blocks in self._children.items()
        }
        assert listed == children, "the prefix cache's children disagree with its blocks"


def make_caches(
    block_size: int,
    num_groups: int,
    journal: CacheJournal,
    events: CacheEvents,
    medium: str,
    num_partitions: int = 1,
) -> list[PrefixCache]:
    """Return a prefix cache of a tier for each cache group of each partition in turn.

    The journal and the events record the blocks of the first group, in all partitions.
    """
    return [
        PrefixCache(block_size, None if group else tier_log(journal, events, medium, partition))
        for partition in range(num_partitions)
        for group in range(num_groups)
    ]


def _common_tokens(left: bytes, right: bytes) -> int:
    """Return the number of equal first int32 tokens."""
    most = min(len(left), len(right)) // 4
    if left[: 4 * most] == right[: 4 * most]:
        return most
    return next(i for i in range(most) if left[4 * i : 4 * i + 4] != right[4 * i : 4 * i + 4])
