"""NodeWatch: the cluster's nodes, and when those that end must be drained."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from .fleet_state import NodeEntry
from .interfaces import Launcher

# A replica on a departing node waits this long for another replica to take over, if its deadline allows.
TAKEOVER_TIMEOUT_S = 120.0
# Deadlines of the same event, converted between two clocks, differ by at most this.
_CLOCK_TOLERANCE_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeDeparture:
    """A node that will end or must be emptied.

    Attributes:
        deadline: time of the watch's clock by which the node's replicas must have drained.
        reason: text for operators.
    """

    deadline: float
    reason: str


class NodeWatch:
    """Nodes and their departures. For one event loop.

    Args:
        clock: monotonic time in seconds.
        wall_clock: Unix time; Ray's deadlines use it.
        on_departure: called when a node's departure becomes known or moves forward.

    Attributes:
        nodes: the nodes of the last `update`.
    """

    def __init__(
        self,
        launcher: Launcher,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        on_departure: Callable[[], None] = lambda: None,
    ) -> None:
        self.nodes: tuple[NodeEntry, ...] = ()
        self._launcher = launcher
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_departure = on_departure
        self._departures: dict[str, NodeDeparture] = {}
        self._notices: dict[str, Future[float] | None] = {}

    def update(self, nodes: tuple[NodeEntry, ...], used_node_ids: Iterable[str]) -> None:
        """Replace the nodes by Ray's current list; watch the used ones for notices of their cloud."""
        self.nodes = nodes
        for node in nodes:
            if node.is_draining:
                within_s = node.gone_at - self._wall_clock() if node.gone_at else TAKEOVER_TIMEOUT_S
                self.depart(node.node_id, within_s, f"node {node.node_id[:12]} drains")
        live = {node.node_id for node in nodes}
        self._departures = {
            node_id: departure for node_id, departure in self._departures.items() if node_id in live
        }
        self._notices = {node_id: notice for node_id, notice in self._notices.items() if node_id in live}
        for node_id in sorted((set(used_node_ids) & live) - set(self._notices)):
            self._watch_for_notice(node_id)

    def depart(self, node_id: str, within_s: float, reason: str) -> None:
        """Record that the node ends, or must be empty, in `within_s` seconds. The earliest deadline counts."""
        deadline = self._clock() + min(TAKEOVER_TIMEOUT_S, max(0.0, within_s))
        known = self._departures.get(node_id)
        if known is None or deadline < known.deadline - _CLOCK_TOLERANCE_S:
            self._departures[node_id] = NodeDeparture(deadline, reason)
            self._on_departure()

    def departure_of(self, node_ids: Iterable[str]) -> NodeDeparture | None:
        """Return the earliest departure among these nodes, or None if all of them stay."""
        departures = [self._departures[node_id] for node_id in node_ids if node_id in self._departures]
        return min(departures, key=lambda departure: departure.deadline, default=None)

    def _watch_for_notice(self, node_id: str) -> None:
        """Start the watcher of the node's notice; it ends with the node."""
        notice = self._notices[node_id] = self._launcher.notice(node_id)
        if notice is not None:
            notice.add_done_callback(partial(self._on_notice_done, asyncio.get_running_loop(), node_id))

    def _on_notice_done(self, loop: asyncio.AbstractEventLoop, node_id: str, notice: Future[float]) -> None:
        """Runs in any thread."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._on_notice, node_id, notice)

    def _on_notice(self, node_id: str, notice: Future[float]) -> None:
        if notice.cancelled() or notice.exception() is not None:
            # The node or only its watcher has ended. If the node lives, the next update starts another watcher.
            self._notices.pop(node_id, None)
            _log.info("the watcher for cloud notices on node %s has ended", node_id[:12])
            return
        self.depart(node_id, notice.result(), f"the cloud takes node {node_id[:12]} back")
