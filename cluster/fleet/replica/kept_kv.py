"""KeptKv: descriptors of the ranks' KV memory in their scheduler's process, so that the KV outlives a rank."""

from __future__ import annotations

import logging

from ....worker.memory.shared_segment import SegmentAddress, SharedSegment

_log = logging.getLogger(__name__)


class KeptKv:
    """The segment of each rank's KV memory, open in this process. It is always the one that the rank uses.

    A rank keeps its segment as long as its process lives. The scheduler maps none of this memory.
    """

    def __init__(self) -> None:
        self._segments: dict[int, SharedSegment] = {}  # rank |-> its segment

    def of_rank(self, rank: int) -> SegmentAddress | None:
        """Return the segment of a rank, as other processes open it now; None if it is not kept."""
        segment = self._segments.get(rank)
        return None if segment is None else segment.address

    def keep(self, rank: int, address: SegmentAddress | None) -> bool:
        """Keep the segment that a rank uses now; return whether it is the one that was kept before."""
        before = self._segments.get(rank)
        if before is not None and address is not None and before.name == address.name:
            return True
        self.drop(rank)
        if address is not None:
            try:
                self._segments[rank] = SharedSegment.open(address)
            except OSError as error:
                _log.info("the KV of rank %d is not kept: %s", rank, error)
        return False

    def drop(self, rank: int) -> None:
        """Close the segment of a rank."""
        segment = self._segments.pop(rank, None)
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Close all segments. Safe to call twice."""
        for rank in list(self._segments):
            self.drop(rank)
