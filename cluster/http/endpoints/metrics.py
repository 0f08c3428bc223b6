"""/metrics: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ...gateway.services import GatewayServices


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["metrics"])

    @router.get(
        "/metrics", summary="Metrics in Prometheus' text format, or in OpenMetrics", response_class=Response
    )
    async def metrics(request: Request) -> Response:
        body, content_type = services.monitor.exposition.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router
