"""/health, /ready, /ping, /version and /load: for load balancers and supervisors."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ...admin.services import GatewayServices
from ...grpc.version import server_version
from ..probes import Probes, load_of
from ..schema.error_body import OPENAI_ERRORS


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["health"], responses=OPENAI_ERRORS)
    probes = Probes(services.models)

    @router.get("/health", summary="200 while the server makes progress; otherwise a restart may help")
    @router.get("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    async def health() -> dict[str, str]:
        if services.fleet is None:  # a fleet's controller restarts its replicas
            probes.check_alive()
        return {"status": "ok"}

    @router.get("/ready", summary="200 if a request to each model would be served")
    async def ready() -> dict[str, str]:
        await probes.check_ready()
        return {"status": "ready"}

    @router.get("/version", summary="Version of the server")
    async def version() -> dict[str, str]:
        return {"version": server_version()}

    @router.get("/load", summary="Requests and KV memory in use")
    async def load() -> dict[str, Any]:
        models = [load_of(model) for model in services.models]
        return {"server_load": sum(_num_requests(model) for model in models), "models": models}

    return router


def _num_requests(load: dict[str, Any]) -> int:
    return int(load["num_requests_running"] + load["num_requests_waiting"])
