"""CacheJournal: changes of the set of cached prefixes, so that gateways can follow it by small reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from ...proto.digests import CACHE_HASH_BYTES
from ...proto.stream import CacheReport

# Hashes in one report: 512 KB. A larger cache reports its newest blocks only.
MAX_REPORTED_HASHES = 65_536
# Changes kept. A gateway that asks once a second needs more only after a long absence.
MAX_CHANGES = 65_536


class CacheJournal:
    """Cached full blocks by the first bytes of their digests, and the latest changes.

    A digest may be in several places (device and host memory); it is removed when it is in none. The blocks are those
    of the first cache group. If other groups have a window, a hit may be shorter than the prefix in the journal, but
    each hit makes the blocks that it needs the last used ones, in all groups.

    Attributes:
        version: number of changes so far.

    Args:
        window_blocks: as in CacheReport.
    """

    def __init__(
        self,
        max_hashes: int = MAX_REPORTED_HASHES,
        max_changes: int = MAX_CHANGES,
        window_blocks: int = 0,
    ) -> None:
        self.version = 0
        self._window_blocks = window_blocks
        self._max_hashes = max_hashes
        self._places: dict[bytes, int] = {}  # hash |-> number of places, the newest hash last
        self._changes: deque[bytes] = deque(maxlen=max_changes)

    def add(self, digests: Iterable[bytes]) -> None:
        """Record that blocks are cached in one more place."""
        places, fresh = self._places, list[bytes]()
        for digest in digests:
            name = digest[:CACHE_HASH_BYTES]
            if name in places:
                places[name] += 1
            else:
                places[name] = 1
                fresh.append(name)
        self.version += len(fresh)
        self._changes += fresh

    def remove(self, digest: bytes) -> None:
        """Record that a block is no longer cached in one place."""
        name = digest[:CACHE_HASH_BYTES]
        count = self._places.pop(name)
        if count > 1:
            self._places[name] = count - 1
        else:
            self.version += 1
            self._changes.append(name)

    def report(self, since: int) -> CacheReport:
        """Return the changes since a version, or the whole set if these are no longer known or would be larger."""
        num_changes = self.version - since
        if since <= 0 or not 0 <= num_changes <= min(len(self._changes), len(self._places)):
            newest = islice(reversed(self._places), self._max_hashes)
            return CacheReport(self.version, 0, b"".join(newest), b"", self._window_blocks)
        # Each once, in an order that does not depend on the process.
        changed = dict.fromkeys(islice(reversed(self._changes), num_changes))
        added = [name for name in changed if name in self._places]
        removed = [name for name in changed if name not in self._places]
        return CacheReport(self.version, since, b"".join(added), b"".join(removed), self._window_blocks)

    def check_integrity(self, digests: list[bytes]) -> None:
        """Raise AssertionError unless `digests`, of all places together, equal the journal's."""
        expected: dict[bytes, int] = {}
        for digest in digests:
            name = digest[:CACHE_HASH_BYTES]
            expected[name] = expected.get(name, 0) + 1
        assert expected == self._places, "the cache journal disagrees with the caches"
