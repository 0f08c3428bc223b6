"""RetainedWeights and RetainedKv: descriptors of the ranks' memory in their scheduler's process, which outlives them.

The scheduler maps none of this memory. Segments of a rank on another node cannot be opened here: the process that
replaces it reads its weights.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ....worker import SegmentAddress, SharedSegment

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# For the ranks to answer; one that is stopped does not.
_ANSWER_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class RetainedWeights:
    """The segments of each rank's weights in use, open in this process. Methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        # rank |-> its segments
        self._segments: dict[int, list[SharedSegment]] = {}
        self._is_closed = False

    def refresh(self, workers: Sequence[ActorHandle]) -> None:
        """Ask the ranks for their segments, on a thread; those of a rank that does not answer stay open."""
        threading.Thread(
            target=self._refresh, args=(tuple(workers),), name="kept-weights", daemon=True
        ).start()

    def of_rank(self, rank: int) -> tuple[SegmentAddress, ...]:
        """Return the segments of a rank, as other processes open them now."""
        with self._lock:
            return tuple(segment.address for segment in self._segments.get(rank, []))

    def keep(self, rank: int, addresses: Iterable[SegmentAddress]) -> None:
        """Open the segments of a rank in place of those that it had before."""
        with self._lock:
            before = self._segments.pop(rank, [])
            if not self._is_closed:
                self._segments[rank] = _open_all(rank, addresses)
            _close_all(before)

    def close(self) -> None:
        """Close all segments. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            while self._segments:
                _close_all(self._segments.popitem()[1])

    def _refresh(self, workers: tuple[ActorHandle, ...]) -> None:
        with self._refreshing:  # the latest answers are kept last
            calls = [worker.weight_segments.remote() for worker in workers]
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S)
            for rank, call in enumerate(calls):
                if call in ready:
                    try:
                        self.keep(rank, ray.get(call))
                    except RayError as error:
                        _log.info("rank %d does not name its weights: %s", rank, error)


def _open_all(rank: int, addresses: Iterable[SegmentAddress]) -> list[SharedSegment]:
    opened = []
    for address in addresses:
        try:
            opened.append(SharedSegment.open(address))
        except OSError as error:
            _log.info("the weights of rank %d are not kept: %s", rank, error)
    return opened


def _close_all(segments: Iterable[SharedSegment]) -> None:
    for segment in segments:
        segment.close()


class RetainedKv:
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
