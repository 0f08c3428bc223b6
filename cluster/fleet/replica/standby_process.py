"""StandbyProcess: a process of a replica that is started before a rank fails, and becomes that rank."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from .process_starter import ProcessStarter

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# For the process to start, in the background.
_START_TIMEOUT_S = 120.0
# For the started process to become a rank.
_ANSWER_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class StandbyProcess:
    """At most one started process, for ranks on the scheduler's node. Methods may be called on any thread.

    A rank that it becomes waits for no process: Ray takes 0.3 to 0.8 s to make an actor of a spare one.
    """

    def __init__(self, starter: ProcessStarter) -> None:
        self._starter = starter
        self._lock = threading.Lock()
        self._ready: ActorHandle | None = None
        self._is_starting = False

    def prepare(self, then: Callable[[], None]) -> None:
        """Have a process started if there is none, and call `then`, on a thread; a failure is logged."""
        with self._lock:
            is_due = self._ready is None and not self._is_starting
            self._is_starting = self._is_starting or is_due
        threading.Thread(target=self._prepare, args=(is_due, then), name="standby", daemon=True).start()

    def take(self, rank: int) -> ActorHandle | None:
        """Return the process, which is the rank now; None if there is none, or the rank is on another node."""
        starter = self._starter
        if starter.node_ids[1 + rank] != starter.node_ids[0]:
            return None
        with self._lock:
            process, self._ready = self._ready, None
        if process is None:
            return None
        try:
            ray.get(process.take_place.remote(starter.configs[rank], rank), timeout=_ANSWER_TIMEOUT_S)
        except RayError as error:
            _log.warning("the standby did not become rank %d: %s", rank, error)
            _end(process)
            return None
        return process

    def _prepare(self, is_due: bool, then: Callable[[], None]) -> None:
        if is_due:
            process = self._start()
            with self._lock:
                self._ready, self._is_starting = process, False
        then()

    def _start(self) -> ActorHandle | None:
        process = None
        try:
            process = self._starter.start_standby()
            ray.get(process.process.remote(), timeout=_START_TIMEOUT_S)
        except Exception as error:  # any, of a cluster that is shutting down
            _log.warning("no standby process was started: %s", error)
            _end(process)
            return None
        return process


def _end(process: ActorHandle | None) -> None:
    if process is not None:
        with suppress(RayError, ValueError):
            ray.kill(process)
