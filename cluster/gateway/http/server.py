"""HttpServer: the FastAPI application, which listens for HTTP in the event loop of its gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from uvicorn import Config
from uvicorn.server import ServerState

from ....proto.errors import ConfigError, ShuttingDown
from ..access.security import ListenAddress
from ..admin.services import GatewayServices, server_version
from ..grpc.server import END_TIMEOUT_S
from .batch_runner import BatchRunner
from .batch_store import BatchStore
from .connection import ConnectionLimits, HttpConnection, PacedWork
from .endpoints import (
    anthropic_messages,
    batches,
    chat_completions,
    completions,
    embeddings,
    infill,
    invocations,
    message_batches,
    operation,
    pages,
    rerank,
    responses,
    state,
    token_generation,
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
    invocations.router,
    tokenization.router,
    token_generation.router,
    infill.router,
    state.models_router,
    operation.lora_router,
    operation.engine_router,
    state.health_router,
    state.metrics_router,
    pages.router,
)


def create_app(
    services: GatewayServices, allowed_origins: Sequence[str] = (), store: BatchStore | None = None
) -> FastAPI:
    """Return the application over these services, with its OpenAPI document at /docs.

    Args:
        allowed_origins: origins of web pages that may call it; ``*`` for all.
        store: keeps the files of /v1/files and /v1/batches; None to leave both out.
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
    app.state.batches = None
    if store is not None:
        app.state.batches = BatchRunner(store, app)
        for batch_router in (batches.router, message_batches.router):
            app.include_router(batch_router(services, app.state.batches))
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


# Connections that the kernel holds until they are accepted.
BACKLOG = 2048
# Connections that are accepted in one turn of the event loop; each takes about 0.1 ms.
_MAX_ACCEPTED = 16
TLS_HANDSHAKE_TIMEOUT_S = 20.0
# For handlers to notice that their connection was closed.
_CANCEL_TIMEOUT_S = 5.0


class HttpServer:
    """HTTP/1.1 server: uvicorn's protocol and a FastAPI application, without uvicorn's processes and signal handlers.

    Args:
        services: shared with the gRPC server of the same gateway.
        listen: ``HOST:PORT``.
        insecure: allow an address that other machines can reach without TLS and tokens.
        allowed_origins: origins of web pages that may call the server; ``*`` for all.
        batch_dir: directory of /v1/files and /v1/batches; None to leave them out.

    Attributes:
        app: the application.
        url: ``http://HOST:PORT``; empty until the server listens.

    Raises:
        ConfigError: the address cannot be used, or needs TLS and tokens.
    """

    def __init__(
        self,
        services: GatewayServices,
        listen: str = "127.0.0.1:0",
        *,
        insecure: bool = False,
        limits: ConnectionLimits | None = None,
        allowed_origins: Sequence[str] = (),
        batch_dir: Path | None = None,
    ) -> None:
        self._address = ListenAddress.parse(listen)
        self._security = services.security
        self._generation = services.generation
        self._on_refused = services.on_refused
        self._closing = services.closing
        self._security.check_listen(self._address, insecure=insecure)
        self._limits = limits or ConnectionLimits()
        store = None if batch_dir is None else BatchStore(batch_dir)
        self.app: FastAPI = create_app(services, allowed_origins, store)
        self._batches: BatchRunner | None = self.app.state.batches
        self.url = ""
        self._state = ServerState()
        self._listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen, and answer requests from then on.

        Returns:
            The URL, with the bound port.

        Raises:
            ConfigError: the port is in use, or the certificate is not valid.
        """
        context = self._security.ssl_context()
        bound = self._bind()
        self._listener = await asyncio.get_running_loop().create_server(
            self._make_protocol(),
            sock=bound,
            backlog=_MAX_ACCEPTED,
            ssl=context,
            ssl_handshake_timeout=None if context is None else TLS_HANDSHAKE_TIMEOUT_S,
        )
        bound.listen(BACKLOG)  # for the kernel; asyncio accepts as many connections per turn as it was told
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{self._address.with_port(bound.getsockname()[1])}"
        if self._batches is not None:
            self._batches.start()
        return self.url

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new connections, wait `grace_s` for requests, then end them with ShuttingDown.

        Safe to call twice.
        """
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        self._closing.set()
        if self._batches is not None:
            await self._batches.stop()
        listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()  # closes an idle connection; another one after its response
        await asyncio.gather(self._generation.shut_down(grace_s), self._wait_for_requests(grace_s))
        await self._wait_for_requests(END_TIMEOUT_S)
        error = ShuttingDown(f"the gateway stops, and its grace period of {grace_s:g} s is over")
        for connection in list(self._state.connections):
            assert isinstance(connection, HttpConnection)
            # A handler that still runs sees a client that went away.
            connection.end(error, HTTPStatus.SERVICE_UNAVAILABLE)
        await self._wait_for_requests(_CANCEL_TIMEOUT_S)
        for task in self._state.tasks:
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    async def _wait_for_requests(self, timeout_s: float) -> None:
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=timeout_s)

    def _bind(self) -> socket.socket:
        address = self._address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address} for HTTP: {error.strerror}") from error

    def _make_protocol(self) -> Callable[[], HttpConnection]:
        """Return the factory of connections."""
        config = Config(
            self.app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",  # the application logs its failures itself
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # HttpConnection sets it
            timeout_keep_alive=int(self._limits.keep_alive_s),
        )
        config.load()
        paced = PacedWork()
        return lambda: HttpConnection(config, self._state, self._limits, self._on_refused, paced)
