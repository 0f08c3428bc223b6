"""/v1/messages/batches, as Anthropic's API: messages that the runner of /v1/batches runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from .....proto.errors import InvalidRequest
from ....client.wire.batch_files import read_batch
from ...admin.services import GatewayServices
from ..batch_runner import WINDOW_S, BatchRunner
from ..batch_store import Item, has_ended
from ..calls import preparing
from ..errors import ANTHROPIC_ERRORS
from ..json_bodies import BodyRoute, in_thread
from ..schema.bounded import Entries, JsonObject
from ..schema.request_model import RequestModel

PATH = "/v1/messages"
_OWN, _STORED = "msgbatch_", "batch-"


class MessageOfBatch(BaseModel):
    """A request of a batch."""

    custom_id: str = Field(min_length=1, max_length=64)
    params: JsonObject


class CreateMessageBatch(RequestModel):
    """Anthropic's fields."""

    requests: Entries[MessageOfBatch] = Field(min_length=1)


def router(services: GatewayServices, runner: BatchRunner) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], responses=ANTHROPIC_ERRORS, route_class=BodyRoute)
    store = runner.store

    def tenant_of(request: Request) -> str:
        return services.authenticator.tenant(request.state.caller, "")

    def find(tenant: str, batch_id: str) -> Item:
        own_id = batch_id.replace(_OWN, _STORED, 1) if batch_id.startswith(_OWN) else ""
        return store.get(tenant, "batch", own_id)

    @router.post("/v1/messages/batches", summary="Run messages beside those of clients")
    async def create(body: CreateMessageBatch, request: Request) -> Item:
        tenant = tenant_of(request)
        with preparing(services, {}):
            names = {each.custom_id for each in body.requests}
            if len(names) < len(body.requests):
                raise InvalidRequest("requests", "have a custom_id twice, must have one for each")
            content = await in_thread(lambda: b"".join(_lines(body)))
            batch_id = store.new_id("batch")
            name = f"{batch_id}_input.jsonl"
            file = await asyncio.to_thread(store.add_file, tenant, name, "batch", content)
            now = int(time.time())
            batch = {
                "id": batch_id, "object": "batch", "endpoint": PATH, "status": "validating", "errors": None,
                "input_file_id": file["id"], "created_at": now, "expires_at": now + WINDOW_S,
                "request_counts": {"total": len(names), "completed": 0, "failed": 0},
            }  # fmt: skip
            store.put(tenant, batch)
        runner.run(tenant, dict(batch))
        return _shown(batch)

    @router.get("/v1/messages/batches", summary="List the batches of messages")
    async def list_batches(
        request: Request, after_id: str | None = None, before_id: str | None = None, limit: _Limit = 20
    ) -> dict[str, Any]:
        entries = await asyncio.to_thread(store.entries, tenant_of(request), "batch")
        shown = [_shown(runner.current(each)) for each in entries if each["endpoint"] == PATH]
        ids = [each["id"] for each in shown]
        if before_id in ids:
            shown = shown[: ids.index(before_id)][-limit:]
            has_more = ids.index(before_id) > limit
        else:
            shown = shown[ids.index(after_id) + 1 :] if after_id in ids else shown
            has_more = len(shown) > limit
            shown = shown[:limit]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return {"data": shown, "has_more": has_more, "first_id": first, "last_id": last}

    @router.get("/v1/messages/batches/{batch_id}", summary="Describe a batch of messages")
    async def get(batch_id: str, request: Request) -> Item:
        return _shown(runner.current(find(tenant_of(request), batch_id)))

    @router.post("/v1/messages/batches/{batch_id}/cancel", summary="End a batch of messages")
    async def cancel(batch_id: str, request: Request) -> Item:
        tenant = tenant_of(request)
        return _shown(runner.current(runner.cancel(tenant, find(tenant, batch_id))))

    @router.delete("/v1/messages/batches/{batch_id}", summary="Drop a batch of messages that has ended")
    async def delete(batch_id: str, request: Request) -> dict[str, str]:
        tenant = tenant_of(request)
        batch = find(tenant, batch_id)
        _require_end(batch)
        for name in ("input_file_id", "output_file_id", "error_file_id", "id"):
            if (entry_id := batch.get(name)) is not None:
                store.delete(tenant, entry_id)
        return {"id": batch_id, "type": "message_batch_deleted"}

    @router.get(
        "/v1/messages/batches/{batch_id}/results", summary="Return the results of a batch of messages"
    )
    async def results(batch_id: str, request: Request) -> Response:
        tenant = tenant_of(request)
        batch = find(tenant, batch_id)
        _require_end(batch)
        return StreamingResponse(_results(runner, tenant, batch), media_type="application/x-jsonl")

    return router


_Limit = Annotated[int, Query(ge=1, le=1000)]


def _lines(body: CreateMessageBatch) -> Iterator[bytes]:
    for each in body.requests:
        line = {"custom_id": each.custom_id, "method": "POST", "url": PATH, "body": each.params}
        yield json.dumps(line).encode() + b"\n"


def _require_end(batch: Item) -> None:
    if not has_ended(batch):
        raise InvalidRequest(
            "batch_id", f"is of a batch that is {batch['status']}, must be of one that ended"
        )


def _results(runner: BatchRunner, tenant: str, batch: Item) -> Iterator[bytes]:
    """Yield a line per request of a batch."""
    store, done = runner.store, set[str]()
    for name in ("output_file_id", "error_file_id"):
        if (file_id := batch.get(name)) is None:
            continue
        with store.content_path(tenant, file_id).open("rb") as file:
            for line in file:
                entry = json.loads(line)
                done.add(entry["custom_id"])
                yield _line(entry["custom_id"], _result(entry["response"]))
    path = store.content_path(tenant, batch["input_file_id"])
    if path.exists():
        kind = {"cancelled": "canceled", "expired": "expired"}.get(batch["status"])
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": _problem(batch)}}
        rest: Item = {"type": "errored", "error": error} if kind is None else {"type": kind}
        for request in read_batch(path, done):
            yield _line(request.custom_id, rest)


def _line(custom_id: str, result: Item) -> bytes:
    return json.dumps({"custom_id": custom_id, "result": result}, ensure_ascii=False).encode() + b"\n"


def _result(response: Item) -> Item:
    status, body = response["status_code"], response["body"]
    if status < 400:
        return {"type": "succeeded", "message": body}
    is_late = status == 408 and body.get("error", {}).get("code") == "batch_expired"
    return {"type": "expired"} if is_late else {"type": "errored", "error": body}


def _problem(batch: Item) -> str:
    errors = batch.get("errors") or {"data": []}
    return "; ".join(each["message"] for each in errors["data"]) or "the request was not run"


def _shown(batch: Item) -> Item:
    """Return Anthropic's object of a batch. As theirs, it counts what was not run as processing until the end."""
    counts, status = batch["request_counts"], batch["status"]
    rest = counts["total"] - counts["completed"] - counts["failed"]
    ended = has_ended(batch)
    own_id = batch["id"].replace(_STORED, _OWN, 1)
    return {
        "id": own_id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if status == "cancelling" else "in_progress",
        "request_counts": {
            "processing": 0 if ended else rest,
            "succeeded": counts["completed"],
            "errored": counts["failed"] + (rest if ended and status in ("completed", "failed") else 0),
            "canceled": rest if status == "cancelled" else 0,
            "expired": rest if status == "expired" else 0,
        },
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "ended_at": _time(batch[f"{status}_at"]) if ended else None,
        "cancel_initiated_at": _time(batch.get("cancelling_at")),
        "archived_at": None,
        "results_url": f"{PATH}/batches/{own_id}/results" if ended else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
