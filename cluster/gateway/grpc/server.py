"""Gateway: the gRPC server with its services, health and reflection. Text outside, token ids behind the services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from ....proto import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from ....proto.errors import ConfigError
from ...os_utils.descriptors import max_connections
from ...os_utils.event_loop import run_in_background
from ..access.authentication import AuthenticationInterceptor
from ..access.security import ListenAddress
from ..admin.services import GatewayServices
from .admin import AdminService
from .health import INFERENCE, HealthService
from .inference import InferenceService
from .message_guard import MessageGuard
from .responses import Context, convert_errors, write_in_time

MAX_MESSAGE_BYTES = 4 << 20
MAX_STREAMS_PER_CONNECTION = 4096
MAX_CONNECTIONS = 16_384

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
# Time for streams to deliver the error that ends them, after the grace period.
END_TIMEOUT_S = 1.0
# gRPC needs milliseconds to end all calls and connections.
_CLOSE_TIMEOUT_S = 5.0
# gRPC's server crashes if two stops reach their deadlines together: the later one uses what the earlier one
# destroyed. So the deadline of the stop that refuses new calls is never reached.
_UNBOUNDED_S = 1e6

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # A client whose machine vanished is detected after 40 s, and its sequences are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_log = logging.getLogger(__name__)


class Gateway:
    """gRPC server for models: quire.v1, health and reflection.

    Args:
        services: shared with the HTTP server of the same gateway.
        listen: ``HOST:PORT``.
        insecure: allow an address that other machines can reach without TLS and tokens.
        reuse_port: several gateways listen on the port, and the system spreads connections over them (SO_REUSEPORT).
            Otherwise a second server on the same port fails, instead of silently taking half of the calls.
        max_connection_age_s: age at which clients are asked to connect again, so that a load balancer can spread
            them; None for no limit. Running calls may then go on for `max_connection_age_grace_s`.

    Raises:
        ConfigError: the address cannot be used, or needs TLS and tokens.
    """

    def __init__(
        self,
        services: GatewayServices,
        listen: str = "127.0.0.1:0",
        *,
        insecure: bool = False,
        reuse_port: bool = False,
        max_connection_age_s: float | None = None,
        max_connection_age_grace_s: float = 60.0,
    ) -> None:
        self._address = ListenAddress.parse(listen)
        self._security = services.security
        self._security.check_listen(self._address, insecure=insecure)
        self._models = services.models
        self._authenticator = services.authenticator
        self._generation = services.generation
        self._options = (
            *_SERVER_OPTIONS,
            ("grpc.so_reuseport", int(reuse_port)),
            ("grpc.max_allowed_incoming_connections", max_connections(MAX_CONNECTIONS)),
            *_age_options(max_connection_age_s, max_connection_age_grace_s),
        )
        self._health = HealthService(services.models)
        self._on_refused = services.on_refused
        self._inference = InferenceService(services, MAX_MESSAGE_BYTES)
        self._admin = AdminService(services)
        self._server: grpc.aio.Server | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    async def start(self) -> str:
        """Listen, and answer calls from then on; readiness comes later.

        Returns:
            The bound ``HOST:PORT``.

        Raises:
            ConfigError: the port is in use, or the certificate is not valid.
        """
        self._server = grpc.aio.server(
            handlers=self._handlers(),
            interceptors=(
                AuthenticationInterceptor(self._authenticator, self._on_refused),
                MessageGuard(self._on_refused),
            ),
            options=self._options,
        )
        self._health.report()
        port = self._bind(self._server)
        if port is None:
            # gRPC's server must be destroyed before its event loop, so no traceback may hold a reference to it.
            await self.stop(0)
            or_tls = (
                "" if self._security.certificate is None else ", or the TLS certificate or key is not valid"
            )
            raise ConfigError(
                f"cannot listen on {self._address}: the address is in use or not this machine's{or_tls}"
            )
        await self._server.start()
        self._monitor = run_in_background(self._update_health(), "updating the gateway's health")
        return str(self._address.with_port(port))

    async def wait_ready(self) -> None:
        """Return once a request would be served. The caller sets the deadline."""
        await self._ready.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report NOT_SERVING, refuse new calls, and wait `grace_s` for requests; then end them with ShuttingDown.

        Safe to call twice.
        """
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
            self._monitor = None
        if self._server is not None:
            server, self._server = self._server, None
            self._health.stop()
            refusing = asyncio.ensure_future(server.stop(_UNBOUNDED_S))
            await self._generation.shut_down(grace_s)
            self._admin.close()
            await asyncio.wait([refusing], timeout=END_TIMEOUT_S)
            if not refusing.done():
                ended = asyncio.gather(server.stop(None), refusing)
                if not (await asyncio.wait([ended], timeout=_CLOSE_TIMEOUT_S))[0]:
                    _log.error("gRPC has not ended its calls in %g s", _CLOSE_TIMEOUT_S)

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the handlers of all services."""
        services: Any = _Services()
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, services)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        names = INFERENCE, ADMIN, HEALTH, reflection.SERVICE_NAME
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(  # type: ignore[no-untyped-call]
            _Reflection(names), services
        )
        handlers: list[grpc.GenericRpcHandler] = services.handlers
        return handlers

    def _bind(self, server: grpc.aio.Server) -> int | None:
        """Return the bound port, or None if the address or the certificate cannot be used."""
        credentials = self._security.server_credentials()
        try:
            if credentials is None:
                return server.add_insecure_port(str(self._address))
            return server.add_secure_port(str(self._address), credentials)
        except RuntimeError:  # gRPC logs the details
            return None

    async def _update_health(self) -> None:
        """Report every change of the models, and set `_ready` while at least one of them is."""
        while True:
            is_ready = self._models.is_ready
            (self._ready.set if is_ready else self._ready.clear)()
            self._health.report()
            await self._models.wait_for_change()


class _Reflection(reflection_pb2_grpc.ServerReflectionServicer):
    """Server reflection. (`enable_server_reflection` would choose the servicer that keeps a thread for each call.)"""

    def __init__(self, names: Sequence[str]) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer(names)

    @convert_errors
    async def ServerReflectionInfo(self, messages: Any, context: Context) -> None:
        async with aclosing(self._servicer.ServerReflectionInfo(messages, context)) as responses:
            async for response in responses:
                await write_in_time(context, response)


class _Services:
    """Stands in for a gRPC server where services are added; keeps the handlers of whole services.

    Generated code also registers each method by itself. grpc.aio then has a task for each of them, 32 here, and adds
    and removes a callback of every task at each call: 0.06 ms.

    Attributes:
        handlers: one per service.
    """

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Keep the handlers."""
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Do nothing: the same methods are in `handlers`."""


def _age_options(max_age_s: float | None, grace_s: float) -> tuple[tuple[str, int], ...]:
    if max_age_s is None:
        return ()
    return (
        ("grpc.max_connection_age_ms", int(1000 * max_age_s)),
        ("grpc.max_connection_age_grace_ms", int(1000 * grace_s)),
    )
