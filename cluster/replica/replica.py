"""A replica as its owner holds it: found by its record, watched, and ended as a whole.

Its processes, a scheduler and the ranks, are Ray actors in one placement group, all of them named after the replica:
whoever knows the id finds them again, from another process and after the launcher has gone.
"""

from __future__ import annotations

import json
import secrets
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from ...proto.config import EngineConfig
from ...proto.errors import ProtocolError, QuireError, ReplicaUnavailable
from ...scheduler.service.actor import WATCH_GROUP
from ..host.closing import Closing
from ..ray_runtime.errors import await_all, unwrap

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_STOP_TIMEOUT_S = 5.0
_ADOPT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What it takes to find a running replica again, and to speak to it. Plain data, for a key-value store.

    Attributes:
        version: of what is deployed, in its owner's words.
        endpoint: where its scheduler hears gateways.
        num_kv_blocks: of its pool, the scratch block included.
        namespace: Ray's, of its actors' names.
        node_ids: Ray's, of the scheduler's node and then of each rank's.
        pids: of the same processes, as their hosts count them.
    """

    replica_id: str
    model: str
    version: str
    endpoint: str
    num_kv_blocks: int
    namespace: str
    node_ids: tuple[str, ...]
    pids: tuple[int, ...]

    @property
    def tensor_parallel_size(self) -> int:
        return len(self.node_ids) - 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ReplicaRecord:
        """Raises ProtocolError on anything that `to_json` did not write."""
        try:
            fields = json.loads(text)
            fields["node_ids"], fields["pids"] = tuple(fields["node_ids"]), tuple(fields["pids"])
            return ReplicaRecord(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"a replica's record cannot be read: {error}") from error


class Replica(Closing):
    """A running replica, as its owner holds it.

    Attributes:
        config: with the number of KV blocks that every rank has.
        failure: ends when the scheduler does: with the QuireError that it failed of, or None when it was closed.
            Whoever waits no longer may cancel it.
    """

    def __init__(self, record: ReplicaRecord, config: EngineConfig, scheduler: ActorHandle) -> None:
        self.record = record
        self.config = config
        self.failure: Future[QuireError | None] = Future()
        self._scheduler = scheduler
        self._life: Future[None] = (
            scheduler.wait_ended.options(concurrency_group=WATCH_GROUP).remote().future()
        )
        self._life.add_done_callback(self._note_end)

    @property
    def replica_id(self) -> str:
        return self.record.replica_id

    @property
    def address(self) -> str:
        """ZeroMQ endpoint where gateways reach the scheduler."""
        return self.record.endpoint

    def close(self) -> None:
        """Ends every process of the replica; requests that still run end UNAVAILABLE. Safe to call twice."""
        if not self._life.done():
            self._scheduler.stop.remote()
            with suppress(TimeoutError, RayError, QuireError):
                self._life.result(_STOP_TIMEOUT_S)
        remove_replica(self.replica_id, self.record.namespace)

    def _note_end(self, life: Future[None]) -> None:
        error = life.exception()
        failure = None if error is None else unwrap(error, f"the scheduler of {self.replica_id}")
        if self.failure.set_running_or_notify_cancel():  # false: nobody waits for it any more
            self.failure.set_result(failure)


def new_replica_id() -> str:
    return f"replica-{secrets.token_hex(3)}"


def adopt_replica(record: ReplicaRecord) -> Replica:
    """Takes over a running replica that another process launched.

    Raises:
        ReplicaUnavailable: it is not running any more, or does not answer; says which process is missing.
    """
    roles = ["scheduler", *(f"rank-{rank}" for rank in range(record.tensor_parallel_size))]
    handles = [_find_actor(record.replica_id, role, record.namespace) for role in roles]
    call = {f"the scheduler of {record.replica_id}": handles[0].config.remote()}
    (config,) = await_all(call, _ADOPT_TIMEOUT_S, "answering its new owner")
    if config is None:
        raise ReplicaUnavailable(f"the scheduler of {record.replica_id} has ended, or never began, to serve")
    return Replica(record, config, handles[0])


def remove_replica(replica_id: str, namespace: str) -> None:
    """Ends whatever there is of a replica, running, half launched or half ended. Does nothing where it is gone."""
    prefix = actor_name(replica_id, "")
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(prefix):
            with suppress(ValueError):  # it ended just now
                ray.kill(ray.get_actor(actor["name"], namespace))
    for group_id, group in placement_group_table().items():
        if group["name"] == placement_name(replica_id, namespace) and group["state"] != "REMOVED":
            remove_placement_group(_group_of(group_id))


def known_replicas(namespace: str) -> set[str]:
    """Ids of all replicas of which there is anything: a process, or a place that is taken or asked for."""
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


def actor_name(replica_id: str, role: str) -> str:
    """Of a replica's process: its role is ``scheduler`` or ``rank-N``."""
    return f"quire/{replica_id}/{role}"


def placement_name(replica_id: str, namespace: str) -> str:
    """Of a replica's placement group. Ray lists those of all namespaces together and does not say which is whose."""
    return f"{namespace}:{actor_name(replica_id, 'place')}"


def _group_of(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))


def _find_actor(replica_id: str, role: str, namespace: str) -> ActorHandle:
    try:
        return ray.get_actor(actor_name(replica_id, role), namespace)
    except ValueError:
        raise ReplicaUnavailable(f"{role} of {replica_id} is not running any more") from None
