"""WeightsRegistry: the latest update of one model's weights, as one gateway knows it.

There is no central record. The gateway that orders an update gives it a timestamp, replicas send that of their
weights with each status, and the latest timestamp wins. So a replica that was restarted, or that a fleet has added,
loads the latest weights before it gets requests.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from ....proto.engine_command import Action, EngineCommand
from ....proto.replica_status import ReplicaStatus
from ....proto.stream import ControlEngine
from ...fleet.replica.client import ReplicaClient

# A replica that could not load the weights is asked again after this time.
RETRY_S = 30.0

_log = logging.getLogger(__name__)


def new_timestamp() -> str:
    """Return a text that sorts after those of earlier calls, on clocks that agree, and is unique."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


class WeightsRegistry:
    """The weights that a model's replicas must have. For one event loop.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: EngineCommand | None = None  # None for the weights that replicas start with
        self._asked_at: dict[ReplicaClient, float] = {}

    @property
    def timestamp(self) -> str:
        """Return the timestamp of the latest update; empty before the first."""
        return "" if self._latest is None else self._latest.timestamp

    def is_current(self, status: ReplicaStatus) -> bool:
        """Return whether a replica has the latest weights."""
        return status.weights_timestamp >= self.timestamp

    def on_update(self, command: EngineCommand) -> None:
        """Record an update that at least one replica has carried out."""
        if command.timestamp > self.timestamp:
            self._latest = command
            self._asked_at.clear()

    def on_status(self, client: ReplicaClient, status: ReplicaStatus) -> None:
        """Learn of an update by another gateway, or have a replica load the weights that it lacks."""
        if status.weights_timestamp > self.timestamp:
            version, path = status.weights_version, status.weights_path
            self.on_update(
                EngineCommand(
                    Action.UPDATE_WEIGHTS, path=path, version=version, timestamp=status.weights_timestamp
                )
            )
        if self._latest is None or self.is_current(status):
            self._asked_at.pop(client, None)
        elif self._clock() - self._asked_at.get(client, -RETRY_S) >= RETRY_S:
            self._asked_at[client] = self._clock()
            _log.info("%s loads weights %r, which it lacks", client.replica_id, self._latest.version)
            client.send(ControlEngine(0, self._latest))

    def forget(self, client: ReplicaClient) -> None:
        """Forget a replica that has been removed."""
        self._asked_at.pop(client, None)
