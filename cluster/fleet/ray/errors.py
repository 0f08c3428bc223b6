"""Ray's errors as QuireErrors: an actor's QuireError is raised again, any other error becomes one line."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from ....proto.errors import QuireError, ReplicaUnavailable, in_one_line

if TYPE_CHECKING:
    from ray import ObjectRef

POLL_INTERVAL_S = 0.5
# Free space that the logs of a new process need.
MIN_DISK_BYTES = 1 << 20
# In Ray's words for an actor whose node's manager, the raylet, has ended or does not answer.
_DEAD_NODE = re.compile(r"its node has died\. Node Id: (\w+)")


def describe(error: BaseException) -> str:
    """Return one line that says how a remote call failed."""
    if isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, (RayActorError, ActorDiedError, WorkerCrashedError)):
        node = _DEAD_NODE.search(str(error))
        how = f"its process died with its Ray node {node[1]}" if node else "its process died"
        return how + full_disk(Path(os.path.realpath("/proc/self/fd/2")))
    return in_one_line(error)


def full_disk(log: Path) -> str:
    """Return that the disk of Ray's logs is full, as an addition to an error; empty if it is not.

    Ray starts no process then, and does not say why.

    Args:
        log: standard error of the process, if Ray started it; other processes have no such file.
    """
    try:
        is_full = log.is_file() and shutil.disk_usage(log.parent).free < MIN_DISK_BYTES
    except OSError:
        return ""
    return (
        f"; the disk of {log.parent} is full, and Ray starts no process without its logs" if is_full else ""
    )


def unwrap(error: BaseException, name: str) -> QuireError:
    """Return the QuireError that an actor raised, or a ReplicaUnavailable that says how the actor `name` failed."""
    if isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, QuireError):
        return error
    return ReplicaUnavailable(f"{name} failed: {describe(error)}")


def await_all(
    calls: Mapping[str, ObjectRef],
    timeout_s: float,
    activity: str,
    on_poll: Callable[[], None] | None = None,
) -> list[Any]:
    """Return the results of remote calls, in order; raise as soon as one of them fails.

    Args:
        calls: name of the process, for errors |-> its call.
        activity: the calls' purpose, as in "rank 1 did not finish loading in 600 s".
        on_poll: called every POLL_INTERVAL_S during the wait.

    Raises:
        QuireError: raised by an actor.
        ReplicaUnavailable: a process died, or did not finish in time; names it.
    """
    names = {ref: name for name, ref in calls.items()}
    pending = list(names)
    deadline = time.monotonic() + timeout_s
    while pending:
        remaining_s = max(0.0, deadline - time.monotonic())
        wait_s = remaining_s if on_poll is None else min(remaining_s, POLL_INTERVAL_S)
        ready, pending = ray.wait(pending, timeout=wait_s)
        if not ready and on_poll is not None and remaining_s > POLL_INTERVAL_S:
            on_poll()
            continue
        if not ready:
            late = " and ".join(names[ref] for ref in pending)
            raise ReplicaUnavailable(f"{late} did not finish {activity} in {timeout_s:g} s")
        try:
            ray.get(ready)
        except RayError as error:
            raise unwrap(error, names[ready[0]]) from None
    return list(ray.get(list(calls.values())))
