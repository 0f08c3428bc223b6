"""Names of a replica's actors and placement group, and its ranks, which any process finds by them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ....proto.errors import in_one_line

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ....worker import WeightSource

# Begin of the role of a process that was started before it was known which rank it becomes.
STANDBY_ROLE = "standby-"
# For a process that was started as a standby to name its rank.
_ANSWER_TIMEOUT_S = 2.0
# For a rank to say where its weights can be read.
_WEIGHTS_TIMEOUT_S = 3.0

_log = logging.getLogger(__name__)


def actor_name(replica_id: str, role: str) -> str:
    """Return the name of a replica's actor; the role is ``scheduler``, ``rank-N`` or begins with STANDBY_ROLE."""
    return f"quire/{replica_id}/{role}"


def placement_name(replica_id: str, namespace: str) -> str:
    """Return the name of a replica's placement group.

    The name contains the namespace because Ray lists the groups of all namespaces together, without theirs.
    """
    return f"{namespace}:{actor_name(replica_id, 'place')}"


def find_rank(replica_id: str, rank: int, namespace: str) -> ActorHandle:
    """Return the actor of a rank, which may have been started as a standby.

    Raises:
        ValueError: the rank has no process.
    """
    try:
        return ray.get_actor(actor_name(replica_id, f"rank-{rank}"), namespace)
    except ValueError:
        for standby, assigned in _standbys(replica_id, namespace):
            if assigned == rank:
                return standby
        raise


def find_weights(
    rank: int, replica_ids: Iterable[str], namespace: str, *, over_network: bool
) -> list[WeightSource]:
    """Return where the weights of a rank can be read, of the replicas that answer in time.

    Args:
        over_network: also from other hosts.
    """
    calls = {}
    for replica_id in replica_ids:
        with suppress(ValueError):  # it is starting or has ended
            worker = find_rank(replica_id, rank, namespace)
            calls[worker.weight_source.remote(replica_id, over_network=over_network)] = replica_id
    if not calls:
        return []
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=_WEIGHTS_TIMEOUT_S)
    found = []
    for call in ready:
        try:
            found.append(ray.get(call))
        except RayError as error:
            _log.info("rank %d of %s does not name its weights: %s", rank, calls[call], in_one_line(error))
    for call in late:
        _log.info("rank %d of %s has not named its weights in %g s", rank, calls[call], _WEIGHTS_TIMEOUT_S)
    return found


def end_standbys(replica_id: str, namespace: str) -> None:
    """End the processes that are no rank yet, and those that do not answer."""
    for standby, assigned in _standbys(replica_id, namespace):
        if assigned is None:
            with suppress(RayError, ValueError):
                ray.kill(standby)


def _standbys(replica_id: str, namespace: str) -> Iterator[tuple[ActorHandle, int | None]]:
    """Yield the processes that were started as a standby, each with its rank."""
    prefix = actor_name(replica_id, STANDBY_ROLE)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(prefix):
            with suppress(ValueError):  # the actor ended after it was listed
                standby = ray.get_actor(actor["name"], namespace)
                assigned = None
                with suppress(RayError):
                    assigned = ray.get(standby.assigned_rank.remote(), timeout=_ANSWER_TIMEOUT_S)
                yield standby, assigned
