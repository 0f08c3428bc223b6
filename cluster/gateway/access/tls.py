"""TLS of both servers: certificates that are read again when their files change, and client certificates."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from ....proto.errors import ConfigError
from ...config.server_options import ServerOptions
from ...os_utils.watched_file import Source, WatchedFiles


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
