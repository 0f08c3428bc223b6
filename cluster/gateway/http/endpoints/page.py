"""The operator's page: its files, and the server-sent events that it draws."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from ...admin.services import GatewayServices
from ..page_feed import PageFeed

# Nothing from elsewhere, and no code but the page's own.
CONTENT_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
EVENTS_PATH = "/ui/events"
# path |-> (file in cluster/gateway/http/page, content type)
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/blocks.js": ("blocks.js", "text/javascript; charset=utf-8"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    feed = PageFeed(services)
    for path, (name, content_type) in PAGE_FILES.items():
        router.add_api_route(path, _file_endpoint(name, content_type))

    @router.get(EVENTS_PATH)
    async def events(replica: str = "") -> Response:
        feed.check_capacity()
        headers = {"cache-control": "no-store"}
        return StreamingResponse(feed.events(replica), media_type="text/event-stream", headers=headers)

    return router


def _file_endpoint(name: str, content_type: str) -> Callable[[], Awaitable[Response]]:
    """Return the endpoint of a file of the page."""
    content = (files("quire.cluster.gateway.http") / "page" / name).read_bytes()
    headers = {
        "content-type": content_type,
        "content-security-policy": CONTENT_POLICY,
        "cache-control": "no-cache",
    }

    async def endpoint() -> Response:
        return Response(content, headers=headers)

    return endpoint
