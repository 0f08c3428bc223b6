"""CacheJournal: how the set of findable prefixes changes, so that a gateway can follow it by small reports."""

from __future__ import annotations

from collections import deque
from itertools import islice

from ...proto.stream import CACHE_HASH_BYTES, CacheReport

# Hashes that one report may carry: 512 KB. A larger cache tells of its newest blocks only.
MAX_REPORTED_HASHES = 65_536
# Changes that are remembered. A gateway that asks once a second is farther behind only after a long absence.
MAX_CHANGES = 65_536


class CacheJournal:
    """Findable full blocks by the first bytes of their digests, and the latest changes among them.

    A digest may be in several places (device and host memory): it goes when it has gone from all.

    Attributes:
        version: changes so far.
    """

    def __init__(self, max_hashes: int = MAX_REPORTED_HASHES, max_changes: int = MAX_CHANGES) -> None:
        self.version = 0
        self._max_hashes = max_hashes
        self._places: dict[bytes, int] = {}  # hash |-> where it can be found, the newest last
        self._changes: deque[bytes] = deque(maxlen=max_changes)

    def add(self, digest: bytes) -> None:
        """The block can be found in one more place."""
        name = digest[:CACHE_HASH_BYTES]
        count = self._places.get(name, 0)
        self._places[name] = count + 1
        if count == 0:
            self._note(name)

    def remove(self, digest: bytes) -> None:
        """The block has gone from one place."""
        name = digest[:CACHE_HASH_BYTES]
        count = self._places.pop(name)
        if count > 1:
            self._places[name] = count - 1
        else:
            self._note(name)

    def report(self, since: int) -> CacheReport:
        """What has changed since that version; all there is where that is not known any more, or would be less."""
        num_changes = self.version - since
        if since <= 0 or not 0 <= num_changes <= min(len(self._changes), len(self._places)):
            newest = islice(reversed(self._places), self._max_hashes)
            return CacheReport(self.version, 0, b"".join(newest), b"")
        changed = set(islice(reversed(self._changes), num_changes))
        added = [name for name in changed if name in self._places]
        removed = [name for name in changed if name not in self._places]
        return CacheReport(self.version, since, b"".join(added), b"".join(removed))

    def check_integrity(self, digests: list[bytes]) -> None:
        """Raises AssertionError unless these, of all places together, are what is believed to be findable."""
        expected: dict[bytes, int] = {}
        for digest in digests:
            name = digest[:CACHE_HASH_BYTES]
            expected[name] = expected.get(name, 0) + 1
        assert expected == self._places, "the cache journal disagrees with the caches"

    def _note(self, name: bytes) -> None:
        self.version += 1
        self._changes.append(name)
