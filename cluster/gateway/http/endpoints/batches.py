"""/v1/files and /v1/batches, as OpenAI's API: requests in a file, run beside those of clients."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse

from .....proto.errors import InvalidRequest
from ...admin.services import GatewayServices
from ..batch_runner import WINDOW_S, BatchRunner
from ..batch_store import Item
from ..calls import preparing
from ..errors import OPENAI_ERRORS
from ..json_bodies import BodyRoute
from ..schema.bounded import Members
from ..schema.request_model import RequestModel
from .message_batches import PATH as MESSAGES_PATH

# Of a form; uploads have two, and clients may add others.
_MAX_PARTS = 16
_MAX_HEAD_BYTES = 4096


class CreateBatch(RequestModel):
    """OpenAI's fields."""

    input_file_id: str
    endpoint: Literal[
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank",
    ]  # fmt: skip
    completion_window: Literal["24h"]
    metadata: Members[str, str] | None = None


def router(services: GatewayServices, runner: BatchRunner) -> APIRouter:
    router = APIRouter(tags=["batches"], responses=OPENAI_ERRORS, route_class=BodyRoute)
    store = runner.store

    def tenant_of(request: Request) -> str:
        return services.authenticator.tenant(request.state.caller, "")

    @router.post("/v1/files", summary="Upload a file of requests", openapi_extra=_UPLOAD)
    async def create_file(request: Request) -> Item:
        with preparing(services, {}):
            if "origin" in request.headers:  # a page may send a form to any server, also without permission
                raise InvalidRequest("file", "comes from a web page, must come from a program")
            form = await asyncio.to_thread(
                parse_form, request.headers.get("content-type", ""), await request.body()
            )
            if "file" not in form:
                raise InvalidRequest("file", "is missing, must be a part of the form")
            name, content = form["file"]
            purpose = form.get("purpose", ("", b""))[1].decode(errors="replace")
            if purpose != "batch":
                raise InvalidRequest("purpose", f"is {purpose[:64]!r}, must be batch")
            return await asyncio.to_thread(store.add_file, tenant_of(request), name, purpose, content)

    @router.get("/v1/files", summary="List the files")
    async def list_files(
        request: Request, after: str | None = None, limit: _Limit = 100, purpose: str | None = None
    ) -> dict[str, Any]:
        files = await asyncio.to_thread(store.entries, tenant_of(request), "file")
        return _page([each for each in files if purpose in (None, each["purpose"])], after, limit)

    @router.get("/v1/files/{file_id}", summary="Describe a file")
    async def get_file(file_id: str, request: Request) -> Item:
        return store.get(tenant_of(request), "file", file_id)

    @router.get("/v1/files/{file_id}/content", summary="Return the content of a file")
    async def get_content(file_id: str, request: Request) -> FileResponse:
        tenant = tenant_of(request)
        store.get(tenant, "file", file_id)
        return FileResponse(store.content_path(tenant, file_id), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}", summary="Drop a file")
    async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
        tenant = tenant_of(request)
        store.get(tenant, "file", file_id)
        store.delete(tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.post("/v1/batches", summary="Run the requests of a file")
    async def create_batch(body: CreateBatch, request: Request) -> Item:
        tenant, now = tenant_of(request), int(time.time())
        with preparing(services, {}):
            store.get(tenant, "file", body.input_file_id)
            batch = body.model_dump() | {
                "id": store.new_id("batch"), "object": "batch", "status": "validating", "errors": None,
                "created_at": now, "expires_at": now + WINDOW_S,
                "request_counts": {"total": 0, "completed": 0, "failed": 0},
            }  # fmt: skip
            store.put(tenant, batch)
        runner.run(tenant, dict(batch))
        return batch

    @router.get("/v1/batches", summary="List the batches")
    async def list_batches(request: Request, after: str | None = None, limit: _Limit = 20) -> dict[str, Any]:
        batches = await asyncio.to_thread(store.entries, tenant_of(request), "batch")
        return _page(
            [runner.current(each) for each in batches if each["endpoint"] != MESSAGES_PATH], after, limit
        )

    @router.get("/v1/batches/{batch_id}", summary="Describe a batch")
    async def get_batch(batch_id: str, request: Request) -> Item:
        return runner.current(store.get(tenant_of(request), "batch", batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", summary="End a batch")
    async def cancel_batch(batch_id: str, request: Request) -> Item:
        tenant = tenant_of(request)
        return runner.cancel(tenant, store.get(tenant, "batch", batch_id))

    return router


_Limit = Annotated[int, Query(ge=1, le=10_000)]
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def parse_form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """Return name |-> file name and content of the parts of a form. Raises InvalidRequest if it is none."""
    boundary = re.search(r'^multipart/form-data;.*boundary="?([^";, ]{1,70})"?', content_type, re.IGNORECASE)
    if boundary is None:
        raise InvalidRequest("body", "must be a form: multipart/form-data")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary[1].encode(), _MAX_PARTS + 2)
    form = {}
    for part in parts[1 : _MAX_PARTS + 1]:
        head, _, content = part.partition(b"\r\n\r\n")
        found = dict(re.findall(rb'[; ](name|filename)="([^"]*)"', head[:_MAX_HEAD_BYTES]))
        texts = {key: value.decode(errors="replace") for key, value in found.items()}
        if b"name" in found:
            form[texts[b"name"]] = texts.get(b"filename", ""), content
    return form


def _page(entries: list[Item], after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of a list, after the entry with an id."""
    if after is not None:
        ids = [entry["id"] for entry in entries]
        entries = entries[ids.index(after) + 1 :] if after in ids else []
    page = entries[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {
        "object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(entries) > limit,
    }  # fmt: skip
