"""The OpenAPI document as a page: Swagger UI, whose files come from the package fastapi-offline instead of a CDN."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from ...admin.services import GatewayServices

# Swagger UI sets styles and draws icons itself; neither it nor the document needs another server.
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
    )
)
_OWN, _SWAGGER = ("quire.cluster.gateway.http", "page"), ("fastapi_offline", "static")
# path |-> (package and folder, file, content type)
DOCS_FILES = {
    "/docs": (_OWN, "docs.html", "text/html; charset=utf-8"),
    "/docs/docs.js": (_OWN, "docs.js", "text/javascript; charset=utf-8"),
    "/docs/swagger-ui-bundle.js": (_SWAGGER, "swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
    "/docs/swagger-ui.css": (_SWAGGER, "swagger-ui.css", "text/css; charset=utf-8"),
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, ((package, folder), name, content_type) in DOCS_FILES.items():
        file = Path(str(files(package) / folder / name))
        router.add_api_route(path, _file_endpoint(file, content_type))
    return router


def _file_endpoint(file: Path, content_type: str) -> Callable[[], Awaitable[FileResponse]]:
    headers = {
        "content-type": content_type,
        "content-security-policy": CONTENT_POLICY,
        "cache-control": "no-cache",
    }

    async def endpoint() -> FileResponse:
        return FileResponse(file, headers=headers)

    return endpoint
