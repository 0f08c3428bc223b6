"""create_app: the application of the HTTP server, composed of one router per family of endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..admin.services import GatewayServices, server_version
from .endpoints import (
    anthropic_messages,
    chat_completions,
    completions,
    embeddings,
    operation,
    pages,
    rerank,
    responses,
    state,
    tokenization,
)
from .errors import install_error_handlers
from .middleware import AuthenticateCalls, LimitBody

ROUTERS: Sequence[Callable[[GatewayServices], APIRouter]] = (
    completions.router,
    chat_completions.router,
    responses.router,
    anthropic_messages.router,
    embeddings.router,
    rerank.router,
    tokenization.router,
    state.models_router,
    operation.lora_router,
    operation.engine_router,
    state.health_router,
    state.metrics_router,
    pages.router,
)


def create_app(services: GatewayServices, allowed_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application over these services, with its OpenAPI document at /docs.

    Args:
        allowed_origins: origins of web pages that may call it; ``*`` for all.
    """
    app = FastAPI(
        title="quire",
        version=server_version(),
        docs_url=None,  # would load Swagger UI from a CDN; see endpoints/pages.py
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    install_error_handlers(app, services.on_refused)
    for router in ROUTERS:
        app.include_router(router(services))
    app.add_middleware(LimitBody, services=services)
    app.add_middleware(AuthenticateCalls, services=services)
    if allowed_origins:  # outside the authentication: a browser asks for permission without a token
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
