"""GatewayServers: the gRPC server and the HTTP server of one `quire serve`."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from typing import Any

from ...config.server_options import ServerOptions
from ...gateway.admin.services import GatewayServices
from ...gateway.grpc.server import Gateway
from ...gateway.http.server import HttpServer
from ...os_utils.descriptors import raise_descriptor_limit


class GatewayServers:
    """Both servers over the same services, started and stopped together.

    Raises:
        ConfigError: an address cannot be used, or needs TLS and tokens.
    """

    def __init__(self, services: GatewayServices, options: ServerOptions) -> None:
        raise_descriptor_limit()
        self._grpc = Gateway(
            services,
            options.listen,
            insecure=options.insecure,
            max_connection_age_s=options.max_connection_age_s,
            max_connection_age_grace_s=options.max_connection_age_grace_s,
        )
        self._http = None if options.no_http else _http_server(services, options)
        self._monitor = services.monitor
        self._grpc_address = ""

    async def start(self) -> None:
        """Listen, and answer calls from then on; readiness comes later.

        Raises:
            ConfigError: a port is in use, or the certificate is not valid.
        """
        self._monitor.start()
        self._grpc_address = await self._grpc.start()
        if self._http is not None:
            await self._http.start()

    @property
    def addresses(self) -> str:
        """The bound addresses, for the log."""
        return self._grpc_address if self._http is None else f"{self._grpc_address} and {self._http.url}"

    async def wait_until_ready(self, *ends: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Wait until requests are served, one of `ends` is done, or the time is over; return if they are served."""
        ready = asyncio.ensure_future(self._grpc.wait_ready())
        await asyncio.wait((ready, *ends), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_ready = ready.done()
        ready.cancel()
        return is_ready

    def announce(self, example_commands: Callable[[str], Iterable[str]] = lambda address: ()) -> None:
        """Print the addresses on stdout, one line each, and then commands that call the server."""
        gc.freeze()  # a full collection of all modules takes 0.1 s, which would delay every stream
        if self._http is not None:
            print(f"quire serves HTTP on {self._http.url}")
        print(
            "\n".join((f"quire is ready on {self._grpc_address}", *example_commands(self._grpc_address))),
            flush=True,
        )

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait `grace_s` for running calls, then end them with ShuttingDown. Safe to call twice."""
        both = [
            self._grpc.stop(grace_s),
            *([] if self._http is None else [self._http.stop(grace_s)]),
        ]
        await asyncio.gather(*both)
        await self._monitor.close()


def _http_server(services: GatewayServices, options: ServerOptions) -> HttpServer:
    origins = () if options.allowed_origins is None else options.allowed_origins.split(",")
    return HttpServer(
        services,
        options.http,
        insecure=options.insecure,
        allowed_origins=origins,
        batch_dir=options.batch_dir,
    )
