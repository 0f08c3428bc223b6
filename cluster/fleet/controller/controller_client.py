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

    async def watch(self, since: str, timeout_s: float) -> FleetState | None: ...

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None: ...

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        """See `Fleet.apply`.

        Raises:
            QuireError: the controller refused the command.
        """
        ...


class ControllerClient:
    """Controller behind a Ray actor handle."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor
        self._state = FleetState("")  # the last one that was received

    async def keys(self) -> CurveKeys:
        return await self._call("keys", self._actor.keys.remote)

    async def watch(self, since: str, timeout_s: float) -> FleetState | None:
        ask = getattr(self._actor, "changes", None)
        if ask is None:  # a controller of an earlier release
            submit = partial(self._actor.watch.remote, since, timeout_s)
            return await self._call("watch", submit, timeout_s + _CALL_TIMEOUT_S)
        known = since if since == self._state.version else ""
        encoded: bytes | None = await self._call(
            "watch", partial(ask.remote, known, timeout_s), timeout_s + _CALL_TIMEOUT_S
        )
        if encoded is None:
            return None
        changes: FleetChanges = pickle.loads(encoded)  # noqa: S301  of the actor, as what Ray itself decodes
        self._state = changes.applied_to(self._state)
        return self._state

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
