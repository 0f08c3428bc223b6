"""FleetStore: what outlives the controller: what is deployed, and which replicas there are. Blocks."""

from __future__ import annotations

import logging

from ...proto.errors import QuireError
from ..config.deployment import Deployment
from ..replica.replica import ReplicaRecord
from .interfaces import Store

_DEPLOYMENT = "deployment/"
_REPLICA = "replica/"

_log = logging.getLogger(__name__)


class FleetStore:
    """Deployments by their model's name, and replicas, each with the deployment that it was started for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> tuple[list[Deployment], list[tuple[Deployment, ReplicaRecord]]]:
        """All that can be read; the rest is told of in the log."""
        deployments, replicas = [], []
        for name, text in self._store.read().items():
            try:
                if name.startswith(_DEPLOYMENT):
                    deployments.append(Deployment.from_json(text))
                elif name.startswith(_REPLICA):
                    made_for, _, record = text.partition("\n")
                    replicas.append((Deployment.from_json(made_for), ReplicaRecord.from_json(record)))
            except QuireError as error:
                _log.error("%s cannot be read, and is left out: %s", name, error)
        return deployments, replicas

    def keep_deployment(self, deployment: Deployment) -> None:
        self._store.write(_DEPLOYMENT + deployment.name, deployment.to_json())

    def forget_deployment(self, name: str) -> None:
        self._store.delete(_DEPLOYMENT + name)

    def keep_replica(self, deployment: Deployment, record: ReplicaRecord) -> None:
        self._store.write(_REPLICA + record.replica_id, f"{deployment.to_json()}\n{record.to_json()}")

    def forget_replica(self, replica_id: str) -> None:
        self._store.delete(_REPLICA + replica_id)
