"""create_app: the application of the HTTP server, composed of one router per family of endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..admin.services import GatewayServices
from ..grpc.version import server_version
from .endpoints import (
    anthropic_messages,
    chat_completions,
    completions,
    docs,
    embeddings,
    engine,
    health,
    lora,
    metrics,
    models,
    page,
    rerank,
    responses,
    tokenization,
)
from .errors import install_error_handlers
from .middleware import AuthenticateCalls, LimitBody

FAMILIES = (
    completions,
    chat_completions,
    responses,
    anthropic_messages,
    embeddings,
    rerank,
    tokenization,
    models,
    lora,
    engine,
    health,
    metrics,
    page,
    docs,
)


def create_app(services: GatewayServices, allowed_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application over these services, with its OpenAPI document at /docs.

    Args:
        allowed_origins: origins of web pages that may call it; ``*`` for all.
    """
    app = FastAPI(
        title="quire",
        version=server_version(),
        docs_url=None,  # would load Swagger UI from a CDN; see endpoints/docs.py
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    install_error_handlers(app, services.on_refused)
    for family in FAMILIES:
        app.include_router(family.router(services))
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
