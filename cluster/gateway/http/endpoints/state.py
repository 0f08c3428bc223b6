"""State of the server: what it serves, whether it makes progress, its load and its metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from .....proto.lora import LoraReference
from ...admin.services import GatewayServices, server_version
from ...routing.served_models import ServedModel
from ..errors import OPENAI_ERRORS
from ..probes import Probes, load_of


def models_router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["models"], responses=OPENAI_ERRORS)
    created = int(time.time())

    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> dict[str, Any]:
        described = [each for model in services.models for each in _describe_all(model, created)]
        return {"object": "list", "data": described}

    @router.get("/v1/models/{model:path}", summary="Describe a served model")
    async def get_model(model: str) -> dict[str, Any]:
        served = services.models.find(model)
        adapter = served.pool.adapters.find(model)
        return _describe(served, created) if adapter is None else _describe_adapter(served, adapter, created)

    return router


def _describe_all(model: ServedModel, created: int) -> list[dict[str, Any]]:
    """Return a model and its adapters."""
    adapters = (_describe_adapter(model, adapter, created) for adapter in model.pool.adapters.adapters)
    return [_describe(model, created), *adapters]


def _describe_adapter(model: ServedModel, adapter: LoraReference, created: int) -> dict[str, Any]:
    return _describe(model, created) | {"id": adapter.name, "root": adapter.path, "parent": model.name}


def _describe(model: ServedModel, created: int) -> dict[str, Any]:
    """Return OpenAI's fields, vLLM's `root`, `parent` and `max_model_len`, and what a prompt may have."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": model.name,
        "parent": None,
        "max_model_len": model.config.max_servable_tokens,
        "input_modalities": [
            "text",
            *["image"] * model.config.model.reads_images,
            *["video"] * model.checker.reads_videos,
        ],
    }


def health_router(services: GatewayServices) -> APIRouter:
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


def metrics_router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["metrics"], responses=OPENAI_ERRORS)

    @router.get(
        "/metrics",
        summary="Metrics in Prometheus' text format, or in OpenMetrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
    )
    async def metrics(request: Request) -> Response:
        body, content_type = services.monitor.exposition.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router
