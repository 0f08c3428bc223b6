"""AdminService: quire.v1.Admin of one gateway, for operators."""

from __future__ import annotations

from typing import Any

import grpc.aio

from ...proto import admin_pb2, admin_pb2_grpc
from ...proto.errors import ConfigError
from ..api.deployment_messages import deployment_from_message
from ..api.status_messages import block_map_to_message
from .fleet_interface import Fleet
from .grpc_errors import convert_errors
from .services import GatewayServices
from .status import block_map, current_status, latest_status

# A map is for a display, which shows the replica's silence instead.
BLOCK_MAP_TIMEOUT_S = 3.0


class AdminService(admin_pb2_grpc.AdminServicer):
    """quire.v1.Admin, whose callers are operators: the interceptor has checked that.

    Args:
        services: without a fleet if the gateway has one replica of its own, which cannot be changed.
    """

    def __init__(self, services: GatewayServices) -> None:
        self._services = services

    @convert_errors
    async def GetStatus(
        self, message: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetStatusResponse:
        return latest_status(self._services) if message.cached else await current_status(self._services)

    @convert_errors
    async def GetBlockMap(
        self, message: admin_pb2.GetBlockMapRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetBlockMapResponse:
        blocks = await block_map(self._services, message.replica_id, BLOCK_MAP_TIMEOUT_S)
        return block_map_to_message(blocks)

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
        if self._services.fleet is None:
            raise ConfigError("this server has one replica of its own; only a fleet can be changed")
        return self._services.fleet
