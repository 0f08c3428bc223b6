"""/v1/models: the served models, as OpenAI and vLLM describe them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from .....proto.lora import LoraReference
from ...admin.services import GatewayServices
from ...routing.served_models import ServedModel
from ..schema.error_body import OPENAI_ERRORS


def router(services: GatewayServices) -> APIRouter:
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
    """Return OpenAI's fields and vLLM's `root`, `parent` and `max_model_len`."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": model.name,
        "parent": None,
        "max_model_len": model.config.max_servable_tokens,
    }
