"""AdminService: quire.v1.Admin of one gateway, for operators."""

from __future__ import annotations

from typing import Any, get_args

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ....proto import admin_pb2, admin_pb2_grpc
from ....proto.engine_command import Action, EngineCommand
from ....proto.errors import ConfigError, ShuttingDown
from ...client.wire.admin_messages import block_map_to_message, deployment_from_message, mode_from_message
from ...fleet.controller.fleet_state import FleetCommand
from ...text.requests.engine_commands import sleep_command, update_command, wake_up_command
from ..admin.engine_control import (
    control_replicas,
    flush_caches,
    inject_fault,
)
from ..admin.services import Fleet, GatewayServices
from ..admin.status import FleetEvents, block_map, current_load, current_status, latest_status
from .responses import Context, convert_errors, write_in_time

# A map is for a display, which shows the replica's silence instead.
BLOCK_MAP_TIMEOUT_S = 3.0


class AdminService(admin_pb2_grpc.AdminServicer):
    """quire.v1.Admin, whose callers are operators: the interceptor has checked that.

    The calls that change a fleet are added below, one for each FleetCommand.

    Args:
        services: have no fleet if the gateway has one replica of its own, which cannot be changed.
    """

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._is_closing = False

    @convert_errors
    async def GetStatus(
        self, message: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        return await (latest_status if message.cached else current_status)(self._services)

    @convert_errors
    async def GetBlockMap(
        self, message: admin_pb2.GetBlockMapRequest, context: Context
    ) -> admin_pb2.GetBlockMapResponse:
        blocks = await block_map(self._services, message.replica_id, BLOCK_MAP_TIMEOUT_S)
        return block_map_to_message(blocks)

    @convert_errors
    async def FlushCache(
        self, message: admin_pb2.FlushCacheRequest, context: Context
    ) -> admin_pb2.FlushCacheResponse:
        replica_ids = await flush_caches(self._services.models.find(message.model).pool)
        return admin_pb2.FlushCacheResponse(replica_ids=replica_ids)

    @convert_errors
    async def InjectFault(
        self, message: admin_pb2.InjectFaultRequest, context: Context
    ) -> admin_pb2.InjectFaultResponse:
        return await inject_fault(self._services, message)

    @convert_errors
    async def LoadLora(
        self, message: admin_pb2.LoadLoraRequest, context: Context
    ) -> admin_pb2.LoadLoraResponse:
        models = self._services.models
        await models.load_lora(message.model, message.name, message.path, replace=message.replace)
        return admin_pb2.LoadLoraResponse()

    @convert_errors
    async def UnloadLora(
        self, message: admin_pb2.UnloadLoraRequest, context: Context
    ) -> admin_pb2.UnloadLoraResponse:
        self._services.models.unload_lora(message.name)
        return admin_pb2.UnloadLoraResponse()

    @convert_errors
    async def ListLoras(
        self, message: admin_pb2.ListLorasRequest, context: Context
    ) -> admin_pb2.ListLorasResponse:
        adapters = [
            admin_pb2.LoraAdapter(name=each.name, path=each.path, model=model.name)
            for model in self._services.models
            for each in model.pool.adapters.adapters
        ]
        return admin_pb2.ListLorasResponse(adapters=adapters)

    @convert_errors
    async def GetLoad(self, message: admin_pb2.GetLoadRequest, context: Context) -> admin_pb2.GetLoadResponse:
        return current_load(self._services.models)

    @convert_errors
    async def Sleep(self, message: admin_pb2.SleepRequest, context: Context) -> admin_pb2.SleepResponse:
        command = sleep_command(message.level or 1, mode_from_message(message.mode))
        await self._control(message.model, command)
        return admin_pb2.SleepResponse()

    @convert_errors
    async def WakeUp(self, message: admin_pb2.WakeUpRequest, context: Context) -> admin_pb2.WakeUpResponse:
        await self._control(message.model, wake_up_command(message.tags))
        return admin_pb2.WakeUpResponse()

    @convert_errors
    async def Pause(self, message: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        command = EngineCommand(Action.PAUSE, mode_from_message(message.mode))
        await self._control(message.model, command)
        return admin_pb2.PauseResponse()

    @convert_errors
    async def Resume(self, message: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        await self._control(message.model, EngineCommand(Action.RESUME))
        return admin_pb2.ResumeResponse()

    @convert_errors
    async def UpdateWeights(
        self, message: admin_pb2.UpdateWeightsRequest, context: Context
    ) -> admin_pb2.UpdateWeightsResponse:
        command = update_command(message.path, message.version, mode_from_message(message.mode))
        await self._control(message.model, command)
        return admin_pb2.UpdateWeightsResponse()

    @convert_errors
    async def WatchEvents(self, message: admin_pb2.WatchEventsRequest, context: Context) -> None:
        events, models = FleetEvents(self._services), self._services.models
        while not self._is_closing:
            changes = events.take()
            for change in changes:
                await write_in_time(context, change)
            if not changes:
                await models.wait_for_change()
        raise ShuttingDown("the gateway stops")

    def close(self) -> None:
        """End the streams of events."""
        self._is_closing = True
        self._services.models.notify_change()

    async def _control(self, model: str, command: EngineCommand) -> None:
        await control_replicas(self._services.models.find(model).pool, command)

    def writable_fleet(self) -> Fleet:
        """Return the fleet that commands go to. Raises ConfigError if there is none."""
        if self._services.fleet is None:
            raise ConfigError("this server has one replica of its own; only a fleet can be changed")
        return self._services.fleet


def _forwarding(kind: type[FleetCommand]) -> Any:
    """Return the handler of the call that a command is named after: the fleet carries it out."""
    call = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name[kind.__name__]
    respond = GetMessageClass(call.output_type)

    @convert_errors
    async def handle(service: AdminService, message: Message, context: Context) -> Message:
        fleet = service.writable_fleet()
        return respond(**await fleet.apply(kind(**_values(message))))

    return handle


def _values(message: Message) -> dict[str, Any]:
    """Return field |-> value of a request; None for an optional field that is not set."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, admin_pb2.Deployment):
            values[field.name] = deployment_from_message(value)
        else:
            values[field.name] = None if field.has_presence and not message.HasField(field.name) else value
    return values


for _kind in get_args(FleetCommand):
    setattr(AdminService, _kind.__name__, _forwarding(_kind))
