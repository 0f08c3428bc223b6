"""/invocations, the one path of models on Amazon SageMaker: the body tells which endpoint is meant."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Message, Receive, Scope, Send

from .....proto.errors import InvalidRequest
from ...admin.services import GatewayServices
from ..calls import preparing
from ..errors import OPENAI_ERRORS
from ..json_bodies import BodyRoute

# Field |-> path of the endpoint whose bodies have it, for models that generate and for those that pool.
_GENERATING = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
_POOLING = {
    "query": "/rerank", "queries": "/score", "text_1": "/score", "data_1": "/score",
    "messages": "/pooling", "input": "/pooling",
}  # fmt: skip


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/invocations", summary="Call the endpoint that the body is for")
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        with preparing(services, {}):
            path = _path_of(services, body)
        return _Forwarded(path, await request.body())

    return router


def _path_of(services: GatewayServices, body: dict[str, Any]) -> str:
    name = body.get("model") or ""
    if not isinstance(name, str):
        raise InvalidRequest("model", "must be text")
    generates = services.models.find(name).config.model.generates
    paths = _GENERATING | {"input": _POOLING["input"]} if generates else _POOLING
    for field, path in paths.items():
        if body.get(field) is not None:
            return path
    raise InvalidRequest("body", f"has none of {', '.join(paths)}, must have one")


class _Forwarded(Response):
    """Response of another endpoint to the body that was read, with all checks of its own."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__()
        self._path, self._unread = path, [body]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_again() -> Message:
            if self._unread:
                return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
            return await receive()

        path = {"path": self._path, "raw_path": self._path.encode()}
        await scope["app"]({**scope, **path}, receive_again, send)
