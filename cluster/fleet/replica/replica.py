"""Replica: a running replica in the process that owns it, and the functions that find and remove one.

A replica's processes, a scheduler and its ranks, are Ray actors in one placement group. Their names and the group's
contain the replica's id, so any process can find them by the id, even after the launching process has ended.
"""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from ....proto.config import EngineConfig
from ....proto.errors import QuireError, ReplicaUnavailable
from ....scheduler import WATCH_GROUP, WorkerGroup
from ...os_utils.closing import Closing
from ...os_utils.process_exit import ProcessExit
from ..ray.errors import await_all, unwrap
from ..ray.launch_target import LaunchTarget
from .process_starter import ProcessStarter
from .rank_lookup import actor_name, placement_name
from .record import ReplicaRecord

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_ADOPT_TIMEOUT_S = 30.0


class Replica(Closing):
    """A running replica in the process that owns it.

    Attributes:
        config: has the number of KV blocks that every rank has.
        starter, target: start its processes again; None if this process does not.
        failure: done when the scheduler ends: the QuireError that it failed with, or None if it was closed. A
            caller that no longer waits may cancel the future.
    """

    def __init__(
        self,
        record: ReplicaRecord,
        config: EngineConfig,
        scheduler: ActorHandle,
        starter: ProcessStarter | None = None,
        target: LaunchTarget | None = None,
    ) -> None:
        self.record = record
        self.config = config
        self.starter = starter
        self.target = target
        self.failure: Future[QuireError | None] = Future()
        self._scheduler = scheduler
        self._process: ProcessExit | None = None
        self._raylet: ProcessExit | None = None
        if self._is_local:
            with suppress(OSError):
                self._process = ProcessExit(record.pids[0])
                self._raylet = self._process.open_parent()
        self._scheduler_end: Future[None] = (
            scheduler.wait_ended.options(concurrency_group=WATCH_GROUP).remote().future()
        )
        self._scheduler_end.add_done_callback(self._on_scheduler_end)

    @property
    def replica_id(self) -> str:
        return self.record.replica_id

    @property
    def address(self) -> str:
        """ZeroMQ endpoint at which the scheduler receives gateways' messages."""
        return self.record.endpoint

    def kill_scheduler(self) -> None:
        """End the scheduler's process, also if it does not answer. Does nothing if it has ended."""
        if self._process is not None:
            self._process.kill()
        self._close_processes()
        with suppress(RayError, ValueError):
            ray.kill(self._scheduler)

    def take_ranks(self) -> WorkerGroup:
        """End the scheduler, and return the ranks, which this process drives from now on.

        Raises:
            ReplicaUnavailable: the scheduler does not answer, or a rank does not join this process.
        """
        calls = {f"the scheduler of {self.replica_id}": self._scheduler.group_maker.remote()}
        (make_group,) = await_all(calls, _ADOPT_TIMEOUT_S, "naming its ranks")
        self.kill_scheduler()
        group: WorkerGroup = replace(make_group, is_takeover=True)()
        return group

    def _close_processes(self) -> None:
        for process in (self._process, self._raylet):
            if process is not None:
                process.close()
        self._process = self._raylet = None

    def close(self) -> None:
        """End every process of the replica; running requests fail as UNAVAILABLE. Safe to call twice."""
        self._close_processes()
        if (
            not ray.is_initialized()
        ):  # at the interpreter's exit Ray may have ended first, and the processes with it
            return
        if not self._scheduler_end.done():
            self._scheduler.stop.remote()
            with suppress(TimeoutError, RayError, QuireError):
                self._scheduler_end.result(_STOP_TIMEOUT_S)
        remove_replica(self.replica_id, self.record.namespace)

    @property
    def _is_local(self) -> bool:
        """Return whether the scheduler's process is on this machine."""
        return self.target is not None and not self.target.is_detached

    @property
    def lost_raylet(self) -> str:
        """The manager of the scheduler's Ray node, if it is on this machine and has ended; empty otherwise."""
        raylet = self._raylet
        return f"its Ray node (raylet pid {raylet.pid})" if raylet is not None and raylet.has_ended else ""

    def _on_scheduler_end(self, end: Future[None]) -> None:
        error = end.exception()
        if error is not None and self.lost_raylet and self._process is not None:
            # Ray takes the scheduler for ended, since its node's manager has: 13 s after that.
            if not self._process.has_ended:
                _log.error("%s goes on without %s, which died", self.replica_id, self.lost_raylet)
            arguments = self._process, self.lost_raylet
            threading.Thread(target=self._fail_at_end, args=arguments, name="raylet", daemon=True).start()
            return
        failure = None if error is None else unwrap(error, f"the scheduler of {self.replica_id}")
        process = self._process
        if isinstance(failure, ReplicaUnavailable) and process is not None and process.describe_memory():
            failure = ReplicaUnavailable(f"{failure}; {process.describe_memory()}")
        self._set_failure(failure)

    def _fail_at_end(self, scheduler: ProcessExit, lost_raylet: str) -> None:
        """Wait for the end of the scheduler, which Ray does not report any more."""
        scheduler.wait()
        how = f"{scheduler.describe()}, after {lost_raylet} had died"
        self._set_failure(ReplicaUnavailable(f"the scheduler of {self.replica_id} failed: {how}"))

    def _set_failure(self, failure: QuireError | None) -> None:
        if self.failure.set_running_or_notify_cancel():  # false if the future was canceled
            self.failure.set_result(failure)


def new_replica_id() -> str:
    return f"replica-{secrets.token_hex(3)}"


def adopt_replica(record: ReplicaRecord, target: LaunchTarget | None = None) -> Replica:
    """Take over a running replica that another process launched.

    Args:
        target: starts another scheduler if this one ends; None if the new owner starts none.

    Raises:
        ReplicaUnavailable: the scheduler is not running or does not answer.
    """
    # The scheduler watches its ranks itself, and may be replacing one of them now.
    scheduler = _find_actor(record.replica_id, "scheduler", record.namespace)
    name = f"the scheduler of {record.replica_id}"
    calls = {name: scheduler.config.remote(), f"{name} ": scheduler.group_maker.remote()}
    config, make_group = await_all(calls, _ADOPT_TIMEOUT_S, "answering its new owner")
    if config is None:
        raise ReplicaUnavailable(
            f"the scheduler of {record.replica_id} does not serve: it ended or never started"
        )
    return Replica(record, config, scheduler, make_group.handles.starter, target)


def remove_replica(replica_id: str, namespace: str) -> None:
    """Kill a replica's actors and free its placement group, in any state. Does nothing if it is gone."""
    prefix = actor_name(replica_id, "")
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(prefix):
            with suppress(ValueError):  # the actor ended after it was listed
                ray.kill(ray.get_actor(actor["name"], namespace))
    for group_id, group in placement_group_table().items():
        if group["name"] == placement_name(replica_id, namespace) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


def known_replicas(namespace: str) -> set[str]:
    """Return the ids of all replicas that have an actor, or a placement group that is placed or pending."""
    names = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace
    ]
    groups = [
        group["name"].removeprefix(f"{namespace}:")
        for group in placement_group_table().values()
        if group["state"] != "REMOVED" and group["name"].startswith(f"{namespace}:")
    ]
    return {
        name.split("/")[1] for name in [*names, *groups] if name.startswith("quire/") and name.count("/") == 2
    }


def _find_actor(replica_id: str, role: str, namespace: str) -> ActorHandle:
    try:
        return ray.get_actor(actor_name(replica_id, role), namespace)
    except ValueError:
        raise ReplicaUnavailable(f"the {role} of {replica_id} is not running") from None
