"""NodeWatch: which machines there are, and which of them will be gone and must be left in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ..controller_api.fleet_state import NodeEntry
from .interfaces import Launcher

# A replica that must leave waits so long for another to take over, where its deadline allows.
LEAVE_PATIENCE_S = 120.0
# The same moment, told again by another clock, may seem to be earlier by so much.
_CLOCK_SLACK_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeDeparture:
    """A node is to be left.

    Attributes:
        by: when what runs there must have drained at the latest, by the watch's clock.
    """

    by: float
    reason: str


class NodeWatch:
    """For one event loop.

    Args:
        clock: seconds that only grow.
        wall_clock: Unix time, in which Ray tells deadlines.
        on_leave: called when a node that was to stay is to be left.

    Attributes:
        nodes: as they were last seen.
    """

    def __init__(
        self,
        launcher: Launcher,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        on_leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.nodes: tuple[NodeEntry, ...] = ()
        self._launcher = launcher
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_leave = on_leave
        self._leaves: dict[str, NodeDeparture] = {}
        self._notices: dict[str, Future[float] | None] = {}

    def update(self, nodes: tuple[NodeEntry, ...], used: Iterable[str]) -> None:
        """What Ray says of all nodes, and which of them replicas run on."""
        self.nodes = nodes
        for node in nodes:
            if node.is_draining:
                within_s = node.gone_at - self._wall_clock() if node.gone_at else LEAVE_PATIENCE_S
                self.leave(node.node_id, within_s, f"node {node.node_id[:12]} drains")
        live = {node.node_id for node in nodes}
        self._leaves = {node_id: leave for node_id, leave in self._leaves.items() if node_id in live}
        self._notices = {node_id: notice for node_id, notice in self._notices.items() if node_id in live}
        for node_id in (set(used) & live) - set(self._notices):
            self._listen(node_id)

    def leave(self, node_id: str, within_s: float, reason: str) -> None:
        """The node will be gone, or is to be empty, in so many seconds; the earliest that was ever said counts."""
        by = self._clock() + min(LEAVE_PATIENCE_S, max(0.0, within_s))
        known = self._leaves.get(node_id)
        if known is None or by < known.by - _CLOCK_SLACK_S:
            self._leaves[node_id] = NodeDeparture(by, reason)
            self._on_leave()

    def departure_of(self, node_ids: Iterable[str]) -> NodeDeparture | None:
        """The first of these nodes that is to be left; None: all stay."""
        leaves = [self._leaves[node_id] for node_id in node_ids if node_id in self._leaves]
        return min(leaves, key=lambda leave: leave.by, default=None)

    def _listen(self, node_id: str) -> None:
        """Has the cloud's notice for the node told; it ends with the node."""
        notice = self._notices[node_id] = self._launcher.notice(node_id)
        if notice is not None:
            notice.add_done_callback(partial(self._hear, asyncio.get_running_loop(), node_id))

    def _hear(self, loop: asyncio.AbstractEventLoop, node_id: str, notice: Future[float]) -> None:
        """In any thread."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._take_notice, node_id, notice)

    def _take_notice(self, node_id: str, notice: Future[float]) -> None:
        if notice.cancelled() or notice.exception() is not None:
            # The node is gone, or only who looked there is: then somebody looks again.
            self._notices.pop(node_id, None)
            _log.info("nobody looks for notices on node %s any more", node_id[:12])
            return
        self.leave(node_id, notice.result(), f"the cloud takes node {node_id[:12]} back")
