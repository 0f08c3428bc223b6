"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters change while the server runs.

The endpoints exist only if an operator allows it: their callers make the ranks open the files that a path names.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field

from ...admin.services import GatewayServices
from ..call_context import preparing
from ..large_request import BodyRoute
from ..schema.error_body import OPENAI_ERRORS
from ..schema.request_model import RequestModel


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


def router(services: GatewayServices) -> APIRouter:
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
