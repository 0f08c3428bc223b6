"""AdminService: quire.v1.Admin of one gateway, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio

from ...proto import admin_pb2, admin_pb2_grpc
from ...proto.errors import ConfigError, ReplicaUnavailable
from ..api.deployment_messages import deployment_from_message
from ..api.status_messages import replica_to_message
from ..config.deployment import Deployment
from .grpc_errors import convert_errors
from .replica_pool import ReplicaPool
from .served_models import ServedModels

STATUS_TIMEOUT_S = 10.0


class Fleet(Protocol):
    """The fleet behind a gateway."""

    def describe(self) -> admin_pb2.GetStatusResponse:
        """Return the fleet's state, without the load figures that only replicas have."""
        ...

    async def deploy(self, deployment: Deployment) -> str:
        """Add or change a deployment and return its version.

        Raises:
            ConfigError: the model cannot be served.
            ReplicaUnavailable: the controller does not answer.
        """
        ...

    async def delete(self, model: str) -> None:
        """Raises ModelNotFound, or ReplicaUnavailable if the controller does not answer."""
        ...

    async def drain(self, target: str) -> Sequence[str]:
        """Drain a replica or a node, by id or unique prefix; return the ids of the replicas that drain.

        Raises:
            InvalidRequest: no replica or node matches, or more than one does.
            ReplicaUnavailable: the controller does not answer.
        """
        ...


class AdminService(admin_pb2_grpc.AdminServicer):
    """quire.v1.Admin, whose callers are operators: the interceptor has checked that.

    Args:
        fleet: None if the gateway has one replica of its own, which cannot be changed.
    """

    def __init__(self, models: ServedModels, fleet: Fleet | None) -> None:
        self._models = models
        self._fleet = fleet

    @convert_errors
    async def GetStatus(
        self, message: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetStatusResponse:
        response = admin_pb2.GetStatusResponse() if self._fleet is None else self._fleet.describe()
        described = {replica.replica_id: replica for replica in response.replicas}
        queries = [
            _replica_status(model.pool, replica_id)
            for model in self._models
            for replica_id in model.pool.clients
        ]
        for status in await asyncio.gather(*queries):
            known = described.get(status.replica_id)
            if known is None:
                response.replicas.append(status)
            else:
                known.MergeFrom(status)
        return response

    @convert_errors
    async def Deploy(
        self, message: admin_pb2.DeployRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeployResponse:
        fleet = self._writable_fleet()
        deployment = deployment_from_message(message.deployment)
        return admin_pb2.DeployResponse(version=await fleet.deploy(deployment))

    @convert_errors
    async def Delete(
        self, message: admin_pb2.DeleteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteResponse:
        await self._writable_fleet().delete(message.model)
        return admin_pb2.DeleteResponse()

    @convert_errors
    async def Drain(
        self, message: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(replica_ids=await self._writable_fleet().drain(message.target))

    def _writable_fleet(self) -> Fleet:
        """Raises ConfigError if there is no fleet."""
        if self._fleet is None:
            raise ConfigError("this server has one replica of its own; only a fleet can be changed")
        return self._fleet


async def _replica_status(pool: ReplicaPool, replica_id: str) -> admin_pb2.Replica:
    """Return the replica's status; if the replica does not answer, a message that names the problem."""
    client = pool.clients.get(replica_id)
    if client is None:  # removed since GetStatus listed the clients
        return admin_pb2.Replica(replica_id=replica_id, model=pool.model, problem="it has just ended")
    try:
        status = await client.status(STATUS_TIMEOUT_S)
    except ReplicaUnavailable as error:
        return admin_pb2.Replica(replica_id=replica_id, model=pool.model, problem=str(error))
    return replica_to_message(status, client.problem or status.problem or pool.why_unavailable(replica_id))
