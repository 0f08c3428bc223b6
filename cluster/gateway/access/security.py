"""Security: the TLS certificate, bearer tokens and tenants of a gateway, and the addresses that it listens on."""

from __future__ import annotations

import ipaddress
import os
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


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certificate of a server, PEM.

    Attributes:
        chain: the certificate and those that signed it.
        key: its private key.
        client_ca: certificates of the authorities one of which must have signed a client's certificate; None if
            clients need none.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None = None

    def ssl_context(self) -> ssl.SSLContext:
        """Raises ConfigError if a certificate or the key is not valid."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # OpenSSL reads files only; this one exists in memory.
        with open(os.memfd_create("tls"), "w+b") as file:
            file.write(b"\n".join((self.chain, self.key)))
            file.flush()
            try:
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
            except ssl.SSLError as error:
                raise ConfigError(f"the TLS certificate or key is not valid: {error.reason}") from error
        if self.client_ca is not None:
            _require_client_certificate(context, self.client_ca)
        return context


def _require_client_certificate(context: ssl.SSLContext, client_ca: bytes) -> None:
    try:
        context.load_verify_locations(cadata=client_ca.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("the file of client authorities has no valid certificate") from error
    context.verify_mode = ssl.CERT_REQUIRED


def watch_certificate(options: ServerOptions) -> Source[Certificate] | None:
    """Return the certificate of a server; None without TLS.

    Raises:
        ConfigError: a file cannot be used, or one of those that belong together is missing.
    """
    cert, key, client_ca = options.tls_cert, options.tls_key, options.tls_client_ca
    if (cert is None) != (key is None):
        raise ConfigError("a TLS certificate and its key must be given together")
    if cert is None or key is None:
        if client_ca is not None:
            raise ConfigError("client certificates need a TLS certificate and its key of the server")
        return None
    paths = [cert, key, *([] if client_ca is None else [client_ca])]
    return WatchedFiles(paths, lambda: load_certificate(cert, key, client_ca), "the TLS certificate")


def load_certificate(cert: Path, key: Path, client_ca: Path | None = None) -> Certificate:
    """Raises ConfigError if a file cannot be read, or the certificate is not valid."""
    authorities = None if client_ca is None else _read(client_ca, "file of client authorities")
    certificate = Certificate(_read(cert, "TLS certificate"), _read(key, "TLS key"), authorities)
    certificate.ssl_context()  # the check: gRPC would log a problem and fail each handshake
    return certificate


def server_credentials(certificates: Source[Certificate]) -> grpc.ServerCredentials:
    """Return gRPC's credentials; each handshake uses the certificate that is current then."""
    first = certificates()
    used = first

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        current = certificates()
        if current is used:
            return None  # the handshake uses the last one
        used = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        fetch,  # type: ignore[arg-type]  # may return None, as gRPC documents
        require_client_authentication=first.client_ca is not None,
    )


def server_ssl_context(certificates: Source[Certificate]) -> ssl.SSLContext:
    """Return an SSL context for a listening socket; each handshake uses the certificate that is current then."""
    used = certificates()
    current_context = used.ssl_context()

    def choose(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        nonlocal used, current_context
        if (current := certificates()) is not used:
            used, current_context = current, current.ssl_context()
        connection.context = current_context

    listening = used.ssl_context()
    listening.sni_callback = choose  # called in each handshake, also without a server name
    return listening


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pair = certificate.key, certificate.chain
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificate.client_ca)


def _read(path: Path, description: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{description} {path} cannot be read: {error.strerror}") from error
