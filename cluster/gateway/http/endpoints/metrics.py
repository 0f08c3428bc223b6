"""/metrics: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ...admin.services import GatewayServices
from ..schema.error_body import OPENAI_ERRORS


def router(services: GatewayServices) -> APIRouter:
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
