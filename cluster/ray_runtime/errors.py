"""Errors of Ray's as ours: what an actor raised on purpose comes out as it was raised; the rest in one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from ...proto.errors import QuireError, ReplicaUnavailable, in_one_line

if TYPE_CHECKING:
    from ray import ObjectRef

MEANWHILE_S = 0.5


def describe(error: BaseException) -> str:
    """One line that says how a remote call failed."""
    if isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, (RayActorError, ActorDiedError, WorkerCrashedError)):
        return "its process died"
    return in_one_line(error)


def unwrap(error: BaseException, who: str) -> QuireError:
    """The QuireError that an actor raised, or one that says what happened to `who`."""
    if isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, QuireError):
        return error
    return ReplicaUnavailable(f"{who} failed: {describe(error)}")


def await_all(
    calls: Mapping[str, ObjectRef],
    timeout_s: float,
    doing: str,
    meanwhile: Callable[[], None] | None = None,
) -> list[Any]:
    """The results of remote calls, in order; fails as soon as one of them does.

    Args:
        calls: who |-> its call.
        doing: what they were asked for, as in "rank 1 did not finish loading in 600 s".
        meanwhile: is called every MEANWHILE_S seconds of the wait.

    Raises:
        QuireError: one that an actor raised.
        ReplicaUnavailable: a process died, or was not done in time; names it.
    """
    who_by_ref = {ref: who for who, ref in calls.items()}
    pending = list(who_by_ref)
    deadline = time.monotonic() + timeout_s
    while pending:
        left_s = max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, timeout=left_s if meanwhile is None else min(left_s, MEANWHILE_S))
        if not ready and meanwhile is not None and left_s > MEANWHILE_S:
            meanwhile()
            continue
        if not ready:
            late = " and ".join(who_by_ref[ref] for ref in pending)
            raise ReplicaUnavailable(f"{late} did not finish {doing} in {timeout_s:g} s")
        try:
            ray.get(ready)
        except RayError as error:
            raise unwrap(error, who_by_ref[ready[0]]) from None
    return list(ray.get(list(calls.values())))
