"""Security: TLS certificate, bearer tokens and tenants of a gateway."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from ....proto.errors import ConfigError
from ...client.wire.tokens import NO_TOKENS, Token, TokenSet, load_tokens
from ...config.server_options import ServerOptions
from ...config.tenants import Tenants, load_tenants
from ...os_utils.watched_file import Source, WatchedFiles, constant
from .tenant_limits import NO_TENANTS
from .tls import Certificate, server_credentials, server_ssl_context, watch_certificate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """``HOST:PORT``. A literal IPv6 host is written in brackets. Port 0 lets the operating system choose."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> ListenAddress:
        """Raises ConfigError unless the text is a host and a port."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not host or (":" in host and not bracketed) or not (port.isascii() and port.isdigit()):
            raise ConfigError(
                f"listening address is {text!r}, must be HOST:PORT, for example 127.0.0.1:50051"
            )
        if int(port) > 65535:
            raise ConfigError(f"listening port is {port}, must be from 0 to 65535")
        return ListenAddress(host, int(port))

    def with_port(self, port: int) -> ListenAddress:
        return ListenAddress(self.host, port)

    @property
    def is_loopback(self) -> bool:
        """Only this machine can connect. Raises ConfigError for a host that cannot be resolved."""
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"listening host {self.host!r} is unknown: {error}") from error
        return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Security:
    """TLS certificate, bearer tokens and tenants of a gateway.

    Attributes:
        certificate: None disables TLS.
        tokens: a call must carry one of these tokens; an empty set disables authentication.
        tenants: the tenants' limits.
    """

    certificate: Source[Certificate] | None = None
    tokens: Source[TokenSet] = NO_TOKENS
    tenants: Source[Tenants] = NO_TENANTS

    @staticmethod
    def load(options: ServerOptions) -> Security:
        """Read the files. Raises ConfigError for a file that cannot be used, or a certificate without its key."""
        return Security(
            watch_certificate(options),
            _tokens(options),
            NO_TENANTS if options.tenants_file is None else _watched(options.tenants_file, load_tenants),
        )

    def check_listen(self, address: ListenAddress, *, insecure: bool) -> None:
        """Raises ConfigError if other machines could connect without TLS, or without a token or certificate."""
        is_encrypted, is_authenticated = self.certificate is not None, bool(self.tokens())
        if self.certificate is not None and self.certificate().client_ca is not None:
            is_authenticated = True
        if insecure or address.is_loopback or (is_encrypted and is_authenticated):
            return
        missing = [
            name
            for name, is_given in (("TLS", is_encrypted), ("a token file", is_authenticated))
            if not is_given
        ]
        raise ConfigError(
            f"{address} can be reached from other machines, but {' and '.join(missing)} is missing; "
            "listen on a loopback address, or allow it explicitly as insecure"
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return gRPC's credentials; None without TLS."""
        return None if self.certificate is None else server_credentials(self.certificate)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings of an HTTP server; None without TLS."""
        return None if self.certificate is None else server_ssl_context(self.certificate)


def _tokens(options: ServerOptions) -> Source[TokenSet]:
    """Return the tokens of the token file, and the API key."""
    keys = [] if options.api_key is None else [Token.of(options.api_key)]
    if options.token_file is None:
        return constant(TokenSet(keys))
    path = options.token_file
    return WatchedFiles([path], lambda: TokenSet([*load_tokens(path), *keys]), f"token file {path}")


def _watched(path: Path, load: Callable[[Path], T]) -> Source[T]:
    return WatchedFiles([path], lambda: load(path), str(path))
