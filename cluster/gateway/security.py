"""Security: TLS certificate, bearer tokens and tenants of a gateway."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from ...proto.errors import ConfigError
from ..api.tokens import NO_TOKENS, TokenSet, load_tokens
from ..config.server_options import ServerOptions
from ..config.tenants import Tenants, load_tenants
from ..host.watched_file import Source, WatchedFiles
from .listen_address import ListenAddress
from .tenant_limits import NO_TENANTS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Security:
    """TLS certificate, bearer tokens and tenants of a gateway.

    Attributes:
        certificate: PEM chain and key of the gateway; None disables TLS.
        tokens: a call must carry one of these tokens; an empty set disables authentication.
        tenants: the tenants' limits.
    """

    certificate: tuple[bytes, bytes] | None = None
    tokens: Source[TokenSet] = NO_TOKENS
    tenants: Source[Tenants] = NO_TENANTS

    @staticmethod
    def load(options: ServerOptions) -> Security:
        """Read the files. Raises ConfigError for a file that cannot be used, or a certificate without its key."""
        tls_cert, tls_key = options.tls_cert, options.tls_key
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("a TLS certificate and its key must be given together")
        certificate = None
        if tls_cert is not None and tls_key is not None:
            certificate = _read(tls_cert, "TLS certificate"), _read(tls_key, "TLS key")
        return Security(
            certificate,
            _watched(options.token_file, load_tokens, "the token file") or NO_TOKENS,
            _watched(options.tenants_file, load_tenants, "the tenants file") or NO_TENANTS,
        )

    def check_listen(self, address: ListenAddress, *, insecure: bool) -> None:
        """Raises ConfigError if other machines could connect without TLS or without a token."""
        if insecure or address.is_loopback or (self.certificate is not None and self.tokens()):
            return
        missing = [
            name for name, given in (("TLS", self.certificate), ("a token file", self.tokens())) if not given
        ]
        raise ConfigError(
            f"{address} can be reached from other machines, but {' and '.join(missing)} is missing; "
            "listen on a loopback address, or allow it explicitly as insecure"
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Returns None without TLS."""
        if self.certificate is None:
            return None
        chain, key = self.certificate
        return grpc.ssl_server_credentials([(key, chain)])

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings of an HTTP server; None without TLS.

        Raises:
            ConfigError: the certificate or the key is not valid.
        """
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # OpenSSL reads files only; this one exists in memory.
        with open(os.memfd_create("tls"), "w+b") as file:
            file.write(b"\n".join(self.certificate))
            file.flush()
            try:
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
            except ssl.SSLError as error:
                raise ConfigError(f"the TLS certificate or key is not valid: {error.reason}") from error
        return context


def _watched(path: Path | None, load: Callable[[Path], T], description: str) -> WatchedFiles[T] | None:
    return None if path is None else WatchedFiles([path], lambda: load(path), description)


def _read(path: Path, description: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{description} {path} cannot be read: {error.strerror}") from error
