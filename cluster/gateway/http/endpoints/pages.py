"""Pages: the operator's, with the server-sent events that it draws, and the OpenAPI document as Swagger UI.

The files of Swagger UI come from the package fastapi-offline instead of a CDN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, StreamingResponse

from ...admin.services import GatewayServices
from ..page_feed import PageFeed

EVENTS_PATH = "/ui/events"
# Nothing from elsewhere, and no code but the page's own.
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
# Swagger UI sets styles and draws icons itself; neither it nor the document needs another server.
DOCS_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
    )
)
_OWN, _SWAGGER = ("quire.cluster.gateway.http", "page"), ("fastapi_offline", "static")
_HTML, _STYLES, _SCRIPT = (
    "text/html; charset=utf-8",
    "text/css; charset=utf-8",
    "text/javascript; charset=utf-8",
)
# path |-> (package and folder, file, content type)
Files = Mapping[str, tuple[tuple[str, str], str, str]]
PAGE_FILES: Files = {
    "/": (_OWN, "index.html", _HTML),
    "/ui/page.css": (_OWN, "page.css", _STYLES),
    "/ui/page.js": (_OWN, "page.js", _SCRIPT),
    "/ui/blocks.js": (_OWN, "blocks.js", _SCRIPT),
    "/ui/icon.svg": (_OWN, "icon.svg", "image/svg+xml"),
}
DOCS_FILES: Files = {
    "/docs": (_OWN, "docs.html", _HTML),
    "/docs/docs.js": (_OWN, "docs.js", _SCRIPT),
    "/docs/swagger-ui-bundle.js": (_SWAGGER, "swagger-ui-bundle.js", _SCRIPT),
    "/docs/swagger-ui.css": (_SWAGGER, "swagger-ui.css", _STYLES),
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    feed = PageFeed(services)
    for served, policy in ((PAGE_FILES, PAGE_POLICY), (DOCS_FILES, DOCS_POLICY)):
        for path, ((package, folder), name, content_type) in served.items():
            file = Path(str(files(package) / folder / name))
            router.add_api_route(path, _file_endpoint(file, content_type, policy))

    @router.get(EVENTS_PATH)
    async def events(replica: str = "") -> Response:
        feed.check_capacity()
        headers = {"cache-control": "no-store"}
        return StreamingResponse(feed.events(replica), media_type="text/event-stream", headers=headers)

    return router


def _file_endpoint(file: Path, content_type: str, policy: str) -> Callable[[], Awaitable[FileResponse]]:
    headers = {
        "content-type": content_type,
        "content-security-policy": policy,
        "cache-control": "no-cache",
    }

    async def endpoint() -> FileResponse:
        return FileResponse(file, headers=headers)

    return endpoint
