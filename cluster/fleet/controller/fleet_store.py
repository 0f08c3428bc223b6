"""FleetStore: deployments and replicas in a Store that outlives the controller. Blocks."""

from __future__ import annotations

import logging

from ....proto.errors import QuireError
from ...config.deployment import Deployment
from ..replica.record import ReplicaRecord
from .interfaces import Store

_DEPLOYMENT = "deployment/"
_REPLICA = "replica/"

_log = logging.getLogger(__name__)


class FleetStore:
    """Deployments by model name, and replicas by id, each with the deployment that it was started for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> tuple[list[Deployment], list[tuple[Deployment, ReplicaRecord]]]:
        """Return (deployments, replicas). Entries that cannot be read are logged and skipped."""
        deployments, replicas = [], []
        for name, text in self._store.read().items():
            try:
                if name.startswith(_DEPLOYMENT):
                    deployments.append(Deployment.from_json(text))
                elif name.startswith(_REPLICA):
                    deployment, _, record = text.partition("\n")
                    replicas.append((Deployment.from_json(deployment), ReplicaRecord.from_json(record)))
            except QuireError as error:
                _log.error("%s cannot be read and is skipped: %s", name, error)
        return deployments, replicas

    def write_deployment(self, deployment: Deployment) -> None:
        self._store.write(_DEPLOYMENT + deployment.name, deployment.to_json())

    def delete_deployment(self, name: str) -> None:
        self._store.delete(_DEPLOYMENT + name)

    def write_replica(self, deployment: Deployment, record: ReplicaRecord) -> None:
        self._store.write(_REPLICA + record.replica_id, f"{deployment.to_json()}\n{record.to_json()}")

    def delete_replica(self, replica_id: str) -> None:
        self._store.delete(_REPLICA + replica_id)
