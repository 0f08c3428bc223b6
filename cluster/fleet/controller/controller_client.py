"""ControllerClient: calls the fleet controller from another process."""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ray.exceptions import RayError

from ....proto.errors import QuireError, ReplicaUnavailable
from ....proto.replica_status import ReplicaStatus
from ....proto.stream import decode
from ....proto.transport.network import CurveKeys
from ..ray.errors import unwrap
from .fleet_state import Demand, Deploy, FleetChanges, FleetCommand, FleetState

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_CALL_TIMEOUT_S = 30.0
# Reading a model's configuration from a slow shared file system, on a busy head node, has taken more than 30 s.
_DEPLOY_TIMEOUT_S = 570.0

T = TypeVar("T")


class Controller(Protocol):
    """The fleet's controller. Every call raises ReplicaUnavailable if the controller does not answer."""

    async def keys(self) -> CurveKeys | None:
        """Return the keys for connections to replicas, or None if they need none."""
        ...

    async def watch(self, gateway_id: str, since: str, timeout_s: float) -> FleetState | None:
        """Return the state once its version differs from `since`, or None after `timeout_s` without a change."""
        ...

    async def statuses(self) -> list[ReplicaStatus]:
        """Return the latest status of each replica, as far as the controller knows it."""
        ...

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None: ...

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        """See `Fleet.apply`.

        Raises:
            QuireError: the controller refused the command.
        """
        ...


class FollowedState:
    """The fleet's state as one gateway has received it, from the answers of `Fleet.follow`."""

    def __init__(self) -> None:
        self._state = FleetState("")

    def known(self, since: str) -> str:
        """Return the version from which to ask for changes; empty to ask for the whole state."""
        return since if since == self._state.version else ""

    def receive(self, encoded: bytes | None) -> FleetState | None:
        """Return the new state; None if the answer tells of no change."""
        if encoded is None:
            return None
        changes: FleetChanges = pickle.loads(encoded)  # noqa: S301  of the actor, as what Ray itself decodes
        self._state = changes.applied_to(self._state)
        return self._state


class ControllerClient:
    """Controller behind a Ray actor handle."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor
        self._followed = FollowedState()

    async def keys(self) -> CurveKeys:
        return await self._call("keys", self._actor.keys.remote)

    async def watch(self, gateway_id: str, since: str, timeout_s: float) -> FleetState | None:
        known = self._followed.known(since)
        submit: Callable[[], ObjectRef[Any]]
        if (follow := getattr(self._actor, "follow", None)) is not None:
            submit = partial(follow.remote, gateway_id, known, timeout_s)
        elif (ask := getattr(self._actor, "changes", None)) is not None:  # a controller of an earlier release
            submit = partial(ask.remote, known, timeout_s)
        else:
            submit = partial(self._actor.watch.remote, since, timeout_s)
            state: FleetState | None = await self._call("watch", submit, timeout_s + _CALL_TIMEOUT_S)
            return state
        encoded: bytes | None = await self._call("watch", submit, timeout_s + _CALL_TIMEOUT_S)
        return self._followed.receive(encoded)

    async def statuses(self) -> list[ReplicaStatus]:
        ask = getattr(self._actor, "statuses", None)
        if ask is None:  # a controller of an earlier release, all of whose replicas each gateway uses
            return []
        return decode_statuses(await self._call("statuses", ask.remote))

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        await self._call("report", partial(self._actor.report.remote, gateway_id, dict(demand)))

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        timeout_s = _DEPLOY_TIMEOUT_S if isinstance(command, Deploy) else _CALL_TIMEOUT_S
        submit = partial(self._actor.apply.remote, command)
        name = re.sub("(?<!^)(?=[A-Z])", "_", type(command).__name__).lower()
        return await self._call(name, submit, timeout_s)

    async def _call(
        self, name: str, submit: Callable[[], ObjectRef[T]], timeout_s: float = _CALL_TIMEOUT_S
    ) -> T:
        """Return the call's result.

        Raises:
            QuireError: the controller raised it; ReplicaUnavailable if the controller does not answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                result: T = await submit()
                return result
        except TimeoutError:
            raise ReplicaUnavailable(
                f"the fleet's controller did not answer {name!r} in {timeout_s:g} s"
            ) from None
        except (RayError, QuireError) as error:
            raise unwrap(error, "the fleet's controller") from None


def decode_statuses(encoded: bytes) -> list[ReplicaStatus]:
    """Return what `Fleet.statuses` has encoded."""
    messages: list[bytes] = pickle.loads(encoded)  # noqa: S301  of the actor, as what Ray itself decodes
    return [each for each in map(decode, messages) if isinstance(each, ReplicaStatus)]
