"""Security: TLS certificate and bearer tokens of a gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from ...proto.errors import ConfigError
from ..api.tokens import NO_TOKENS, TokenSet, load_tokens
from ..host.watched_file import Source, WatchedFiles
from .listen_address import ListenAddress


@dataclass(frozen=True, slots=True)
class Security:
    """TLS certificate and bearer tokens of a gateway.

    Attributes:
        certificate: PEM chain and key of the gateway; None disables TLS.
        tokens: a call must carry one of these tokens; an empty set disables authentication.
    """

    certificate: tuple[bytes, bytes] | None = None
    tokens: Source[TokenSet] = NO_TOKENS

    @staticmethod
    def load(
        *, tls_cert: Path | None = None, tls_key: Path | None = None, token_file: Path | None = None
    ) -> Security:
        """Read the files. Raises ConfigError for a file that cannot be used, or a certificate without its key."""
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("a TLS certificate and its key must be given together")
        certificate = None
        if tls_cert is not None and tls_key is not None:
            certificate = _read(tls_cert, "TLS certificate"), _read(tls_key, "TLS key")
        if token_file is None:
            return Security(certificate)
        return Security(
            certificate, WatchedFiles([token_file], lambda: load_tokens(token_file), "token file")
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


def _read(path: Path, description: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{description} {path} cannot be read: {error.strerror}") from error
