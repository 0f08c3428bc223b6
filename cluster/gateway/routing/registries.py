"""Orders of an operator for every replica of a model, as one gateway knows them: adapters and weights.

There is no central list. Each replica keeps one too and sends it with its status. Of the adapters the entry with the
later version wins, for each name, and an unloaded adapter leaves an entry without a path; of the weights the latest
timestamp wins. So a new replica, a restarted one and a new gateway learn both from the others. A replica loads
the latest weights before it gets requests, and any process may fail.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ....proto.config import LoraConfig
from ....proto.engine_command import Action, EngineCommand
from ....proto.errors import ConfigError, InvalidRequest, LoraLoadError, ModelNotFound, ReplicaUnavailable
from ....proto.lora import (
    MAX_LORA_NAME_CHARS,
    MAX_LORA_PATH_CHARS,
    MAX_REGISTERED_LORAS,
    LoraReference,
    merge_references,
)
from ....proto.replica_status import ReplicaStatus
from ....proto.stream import ControlEngine
from ...fleet.replica.client import ReplicaClient
from ...text.requests.json_values import check_text

# For all ranks of a replica to read an adapter.
LOAD_TIMEOUT_S = 120.0
# A replica that could not load the weights is asked again after this time.
RETRY_S = 30.0

_log = logging.getLogger(__name__)


class LoraRegistry:
    """The adapters of one model by name. For one event loop.

    Args:
        model: the model's name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._is_enabled = False
        self._entries: dict[
            str, LoraReference
        ] = {}  # name |-> latest reference; without a path once unloaded

    def configure(self, config: LoraConfig | None) -> None:
        """Set the adapters of the deployment, under those that were loaded at run time."""
        self._is_enabled = config is not None
        if config is not None:
            merge_references(self._entries, config.modules)

    @property
    def adapters(self) -> tuple[LoraReference, ...]:
        """Return the adapters that requests may name, by name."""
        if not self._is_enabled:
            return ()
        return tuple(entry for _, entry in sorted(self._entries.items()) if entry.path)

    def find(self, name: str) -> LoraReference | None:
        """Return the adapter that requests name so; None if there is none."""
        entry = self._entries.get(name) if self._is_enabled else None
        return entry if entry is not None and entry.path else None

    async def load(
        self, clients: Iterable[ReplicaClient], name: str, path: str, *, replace: bool = False
    ) -> None:
        """Have all replicas read an adapter, which requests may name from then on.

        Args:
            replace: an adapter of the same name is replaced; requests that use it end in order.

        Raises:
            ConfigError: the model runs without adapters.
            InvalidRequest: the name or the path is not allowed, or the name is taken.
            LoraLoadError: a replica cannot read it. It is taken back on all.
            ReplicaUnavailable: no replica answers.
        """
        self._check(name, path, replace)
        previous = self._entries.get(name)
        entry = LoraReference(name, str(Path(path).absolute()), self._next_version(name))
        clients = list(clients)
        results = await asyncio.gather(
            *(client.load_lora(entry, LOAD_TIMEOUT_S) for client in clients), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        fatal = [error for error in errors if not isinstance(error, ReplicaUnavailable)]
        if fatal or (errors and len(errors) == len(clients)):
            self._take_back(clients, entry, previous)
            raise (fatal or errors)[0]
        merge_references(self._entries, [entry])

    def unload(self, clients: Iterable[ReplicaClient], name: str) -> None:
        """Refuse new requests for an adapter; replicas drop it once the running ones have ended.

        Raises:
            ModelNotFound: there is no such adapter.
        """
        if self.find(name) is None:
            raise ModelNotFound(f"adapter {name!r} is not loaded")
        entry = LoraReference(name, "", self._next_version(name))
        merge_references(self._entries, [entry])
        for client in clients:
            client.register_lora(entry)

    def on_status(self, client: ReplicaClient, status: ReplicaStatus) -> bool:
        """Learn from a replica what others have loaded, and tell it what it lacks; return whether names changed."""
        if not self._is_enabled:
            return False
        known = self.adapters
        merge_references(self._entries, status.loras)
        theirs: Mapping[str, LoraReference] = {entry.name: entry for entry in status.loras}
        for name, entry in self._entries.items():
            other = theirs.get(name)
            if other is None or other.version < entry.version:
                client.register_lora(entry)
        return self.adapters != known

    def _next_version(self, name: str) -> str:
        entry = self._entries.get(name)
        return new_timestamp(after="" if entry is None else entry.version)

    def _take_back(
        self, clients: Iterable[ReplicaClient], entry: LoraReference, previous: LoraReference | None
    ) -> None:
        """Have replicas that may have read an adapter forget it, and know the previous one of the name again."""
        path = "" if previous is None else previous.path
        restored = LoraReference(entry.name, path, new_timestamp(after=entry.version))
        merge_references(self._entries, [restored])
        for client in clients:
            client.register_lora(restored)

    def _check(self, name: str, path: str, replace: bool) -> None:
        if not self._is_enabled:
            raise ConfigError(f"model {self._model!r} runs without enable_lora")
        for field, text, most in (
            ("lora_name", name, MAX_LORA_NAME_CHARS),
            ("lora_path", path, MAX_LORA_PATH_CHARS),
        ):
            if not 1 <= len(text) <= most:
                raise InvalidRequest(field, f"has {len(text)} characters, must have 1 to {most}")
            check_text(field, text)
        if self.find(name) is not None and not replace:
            raise InvalidRequest(
                "lora_name", f"is {name!r}, which is loaded already; unload it, or replace it"
            )
        if len(self.adapters) >= MAX_REGISTERED_LORAS:
            raise LoraLoadError(f"{MAX_REGISTERED_LORAS} adapters are loaded, which is the most; unload one")


def new_timestamp(after: str = "") -> str:
    """Return a unique text that sorts after another of its kind, and after earlier ones of clocks that agree.

    A clock that is set back must not make an operator's next order older than the one that is in use. So the time
    goes on from the latest known one (as a hybrid logical clock's does: Kulkarni et al., 2014).
    """
    known_ns = int(after.partition("-")[0]) if after else 0
    return f"{max(time.time_ns(), known_ns + 1):020d}-{secrets.token_hex(4)}"


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
