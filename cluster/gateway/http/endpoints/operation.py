"""Endpoints that change a running server, with the routes of vLLM: LoRA adapters, and the engine for trainers.

They exist only if an operator allows it: their callers stop the engine, and name files that the ranks read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from .....proto.engine_command import Action, EngineCommand, PauseMode
from ....text.requests.engine_commands import (
    RESET_PREFIX_CACHE,
    collective_results,
    read_collective_call,
    read_mode,
    sleep_command,
    update_command,
    wake_up_command,
)
from ...admin.engine_control import (
    control_replicas,
    flush_caches,
    is_paused,
    is_sleeping,
)
from ...admin.services import GatewayServices
from ..calls import preparing
from ..errors import OPENAI_ERRORS
from ..json_bodies import BodyRoute, json_bytes
from ..schema.bounded import Entries, JsonObject, Limited
from ..schema.request_model import RequestModel


class UpdateWeights(RequestModel):
    """Weights to load in place of the present ones.

    Attributes:
        path: a directory of safetensors files on every node of the ranks.
        version: a new name of the weights, which answers report.
        mode: keep, wait or abort running requests.
        model: not needed if the server serves one.
    """

    path: str
    version: str
    mode: str = Field("keep", description="keep, wait or abort: the treatment of running requests.")
    model: str = ""


class CollectiveRpc(RequestModel):
    """A method that all ranks carry out; see docs/http.md."""

    method: str
    args: Limited[Entries[Any]] = Field(default_factory=list)
    kwargs: JsonObject = Field(default_factory=dict)
    timeout: float | None = Field(None, description="Has no effect: each command has a deadline.")
    model: str = ""


class LoadLoraAdapter(RequestModel):
    """An adapter to load.

    Attributes:
        load_inplace: replace an adapter of the same name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = Field(False, description="Replace an adapter of the same name.")


class UnloadLoraAdapter(RequestModel):
    """An adapter to unload.

    Attributes:
        lora_int_id: not used.
    """

    lora_name: str
    lora_int_id: int | None = Field(None, description="Not used.")


def lora_router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["adapters"], responses=OPENAI_ERRORS, route_class=BodyRoute)
    if not services.allows_lora_updates:
        return router

    @router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter")
    async def load(body: LoadLoraAdapter) -> PlainTextResponse:
        with preparing(services, {}):
            await services.models.load_lora("", body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter")
    async def unload(body: UnloadLoraAdapter) -> PlainTextResponse:
        with preparing(services, {}):
            services.models.unload_lora(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def engine_router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["engine"], responses=OPENAI_ERRORS, route_class=BodyRoute)
    if not services.allows_engine_control:
        return router

    async def control(model: str, command: EngineCommand) -> None:
        await control_replicas(services.models.find(model).pool, command)

    @router.post("/sleep", summary="Free the memory of weights and KV cache")
    async def sleep(level: int = 1, mode: str = PauseMode.KEEP, model: str = "") -> None:
        with preparing(services, {}):
            await control(model, sleep_command(level, read_mode(mode)))

    @router.post("/wake_up", summary="End a sleep, or a part of it: weights, kv_cache")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None, model: str = "") -> None:
        with preparing(services, {}):
            await control(model, wake_up_command(tags or ()))

    @router.get("/is_sleeping", summary="Tell whether the engine sleeps")
    async def get_sleeping(model: str = "") -> dict[str, bool]:
        return {"is_sleeping": is_sleeping(services.models.find(model).pool)}

    @router.post("/pause", summary="Hold the steps; new requests wait")
    async def pause(mode: str = PauseMode.KEEP, model: str = "") -> dict[str, str]:
        with preparing(services, {}):
            await control(model, EngineCommand(Action.PAUSE, read_mode(mode)))
        return {"status": "paused"}

    @router.post("/resume", summary="End a pause")
    async def resume(model: str = "") -> dict[str, str]:
        with preparing(services, {}):
            await control(model, EngineCommand(Action.RESUME))
        return {"status": "resumed"}

    @router.post("/reset_prefix_cache", summary="Forget the cached prefixes")
    async def reset_prefix_cache(model: str = "") -> None:
        with preparing(services, {}):
            await flush_caches(services.models.find(model).pool)

    @router.post("/collective_rpc", summary="Have all ranks carry out a method")
    async def collective_rpc(body: CollectiveRpc) -> dict[str, Any]:
        with preparing(services, {}):
            command = read_collective_call(body.method, body.args, body.kwargs)
            pool = services.models.find(body.model).pool
            if command is not None:
                await control_replicas(pool, command)
            elif body.method == RESET_PREFIX_CACHE:
                await flush_caches(pool)
        ranks = [rank for status in pool.statuses for rank in status.ranks]
        return {"results": collective_results(body.method, ranks)}

    @router.get("/server_info", summary="Return the configuration of the engine")
    async def server_info(model: str = "") -> Response:
        config = services.models.find(model).config
        return Response(json_bytes({"config": asdict(config)}), media_type="application/json")

    @router.get("/is_paused", summary="Tell whether the engine is paused")
    async def get_paused(model: str = "") -> dict[str, bool]:
        return {"is_paused": is_paused(services.models.find(model).pool)}

    @router.post("/update_weights", summary="Replace the weights by those of other files")
    async def update_weights(body: UpdateWeights) -> dict[str, str]:
        with preparing(services, {}):
            await control(body.model, update_command(body.path, body.version, read_mode(body.mode)))
        return {"weights_version": body.version}

    return router
