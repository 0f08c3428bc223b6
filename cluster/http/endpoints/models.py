"""/v1/models: the served models, as OpenAI and vLLM describe them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from ...gateway.served_models import ServedModel
from ...gateway.services import GatewayServices
from ..schema.error_body import OPENAI_ERRORS


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["models"], responses=OPENAI_ERRORS)
    created = int(time.time())

    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(model, created) for model in services.models]}

    @router.get("/v1/models/{model:path}", summary="Describe a served model")
    async def get_model(model: str) -> dict[str, Any]:
        return _describe(services.models.find(model), created)

    return router


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
