"""Names of a replica's actors and placement group, and its ranks, which any process finds by them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ....proto.errors import in_one_line
from ....worker import NodePeers
from ..ray.errors import describe

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from ....worker import WeightSource

# Begin of the role of a process that was started before it was known which rank it becomes.
STANDBY_ROLE = "standby-"
# For a process that was started as a standby to name its rank.
_ANSWER_TIMEOUT_S = 2.0
# For all ranks of all replicas together to say where their weights, or their nodes' copies, can be read.
_WEIGHTS_TIMEOUT_S = 3.0
# Earlier replicas from whose copies a node may fill its own, one after another.
_MAX_EARLIER = 3

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
    num_ranks: int, replica_ids: Sequence[str], namespace: str, *, over_network: bool
) -> list[list[WeightSource]]:
    """Return for each rank where its weights can be read, of the replicas that answer in time, all asked at once.

    A replica that has ended, hangs or fails is left out, and the log names it.

    Args:
        over_network: also from other hosts.
    """
    found: list[list[WeightSource]] = [[] for _ in range(num_ranks)]
    calls: dict[ObjectRef, tuple[str, int]] = {}
    deadline = time.monotonic() + _WEIGHTS_TIMEOUT_S
    for number, replica_id in enumerate(replica_ids):
        if time.monotonic() >= deadline:
            late_ids = ", ".join(replica_ids[number:])
            _log.warning("not asked for weights, since others have not answered in time: %s", late_ids)
            break
        for rank in range(num_ranks):
            try:
                worker = find_rank(replica_id, rank, namespace)
            except (ValueError, RayError) as error:
                _log.info("%s is not asked for weights: %s", replica_id, in_one_line(error))
                break
            calls[worker.weight_source.remote(replica_id, over_network=over_network)] = replica_id, rank
    for (_, rank), source in _answers(calls, deadline).items():
        found[rank].append(source)
    return found


def find_copies(
    leaders: Mapping[str, tuple[int, ActorHandle]],
    replica_id: str,
    earlier_ids: Sequence[str],
    namespace: str,
) -> dict[str, NodePeers]:
    """Return for each node of a replica the nodes from which it can fill its copy of the model's files.

    Nodes that do not answer in time are left out, and the log names them.

    Args:
        leaders: node id |-> number and actor of a rank there; the ranks need not have loaded.
        earlier_ids: replicas that have loaded the same files or began to, the one to ask first in front.
    """
    deadline = time.monotonic() + _WEIGHTS_TIMEOUT_S
    calls: dict[ObjectRef, tuple[str, int]] = {}
    if len(leaders) > 1:
        for rank, worker in leaders.values():
            calls[worker.copy_sources.remote(replica_id, len(leaders))] = replica_id, rank
    num_calls = len(calls)
    for earlier_id in earlier_ids:
        if len(calls) == num_calls + _MAX_EARLIER or time.monotonic() >= deadline:
            break
        try:
            worker = find_rank(earlier_id, 0, namespace)
            calls[worker.copy_sources.remote(earlier_id, len(leaders))] = earlier_id, 0
        except (ValueError, AttributeError, RayError) as error:  # ended, or of an earlier release
            _log.info("%s is not asked for its copy: %s", earlier_id, in_one_line(error))
    answers = _answers(calls, deadline)
    own_ranks = [rank for rank, _ in leaders.values()]
    fellows = {rank: sources for rank in own_ranks if (sources := answers.get((replica_id, rank)))}
    earlier = [sources for each in earlier_ids if (sources := answers.get((each, 0)))]
    return {
        node: NodePeers(
            tuple(sources[number] for sources in fellows.values()),
            list(fellows).index(rank) if rank in fellows else None,
            # A node of both replicas has one copy, which its fellows divide already.
            tuple(sources[number] for sources in earlier if sources[number].node not in leaders),
        )
        for number, (node, (rank, _)) in enumerate(leaders.items())
    }


def _answers(calls: Mapping[ObjectRef, tuple[str, int]], deadline: float) -> dict[tuple[str, int], Any]:
    """Return replica id and rank |-> the answer to its call, of those that answer in time."""
    answers: dict[tuple[str, int], Any] = {}
    if not calls:
        return answers
    left_s = max(0.0, deadline - time.monotonic())
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=left_s)
    for call in ready:
        replica_id, rank = calls[call]
        try:
            answers[replica_id, rank] = ray.get(call)
        except RayError as error:
            _log.warning("rank %d of %s does not name its weights: %s", rank, replica_id, describe(error))
    for call in late:
        replica_id, rank = calls[call]
        _log.warning("rank %d of %s has not named its weights in %g s", rank, replica_id, _WEIGHTS_TIMEOUT_S)
    return answers


def end_standbys(replica_id: str, namespace: str) -> None:
    """End the processes that are no rank yet, and those that do not answer."""
    for standby, assigned in _standbys(replica_id, namespace):
        if assigned is None:
            with suppress(RayError, ValueError):
                ray.kill(standby)


def _standbys(replica_id: str, namespace: str) -> Iterator[tuple[ActorHandle, int | None]]:
    """Yield the processes that were started as a standby, each with its rank; all are asked at once."""
    prefix = actor_name(replica_id, STANDBY_ROLE)
    asked: dict[ObjectRef, ActorHandle] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(prefix):
            with suppress(ValueError):  # the actor ended after it was listed
                standby = ray.get_actor(actor["name"], namespace)
                asked[standby.assigned_rank.remote()] = standby
    if asked:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_TIMEOUT_S)
        for call, standby in asked.items():
            assigned = None
            if call in ready:
                with suppress(RayError):
                    assigned = ray.get(call)
            yield standby, assigned
