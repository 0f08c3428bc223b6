"""Who may listen where, and who may call: addresses, TLS and bearer tokens."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from ..proto.errors import ConfigError, Unauthenticated

_BEARER = "Bearer "


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """``HOST:PORT``; a literal IPv6 host is written in brackets; port 0 lets the system choose."""

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
        """Only this machine can reach it. Raises ConfigError for a host that does not exist."""
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
    """What a gateway asks of its callers.

    Attributes:
        certificate: PEM chain and key that the gateway shows; None: calls come in the clear.
        tokens: a call must carry one of these; empty: it need not.
    """

    certificate: tuple[bytes, bytes] | None = None
    tokens: tuple[bytes, ...] = ()

    @staticmethod
    def load(
        *, tls_cert: Path | None = None, tls_key: Path | None = None, token_file: Path | None = None
    ) -> Security:
        """Raises ConfigError on a file that cannot be used, or a certificate without its key."""
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("a TLS certificate and its key must be given together")
        certificate = None
        if tls_cert is not None and tls_key is not None:
            certificate = _read(tls_cert, "TLS certificate"), _read(tls_key, "TLS key")
        return Security(certificate, () if token_file is None else load_tokens(token_file))

    def check_listen(self, address: ListenAddress, *, insecure: bool) -> None:
        """Raises ConfigError when others could reach the address without TLS and a token."""
        if insecure or address.is_loopback or (self.certificate is not None and self.tokens):
            return
        lacking = [
            name for name, have in (("TLS", self.certificate), ("a token file", self.tokens)) if not have
        ]
        raise ConfigError(
            f"{address} can be reached from other machines, but {' and '.join(lacking)} is missing; "
            "listen on a loopback address, or allow it explicitly as insecure"
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: calls come in the clear."""
        if self.certificate is None:
            return None
        chain, key = self.certificate
        return grpc.ssl_server_credentials([(key, chain)])

    def check_call(self, authorization: str | bytes | None) -> None:
        """Raises Unauthenticated unless the call's ``authorization`` metadata carries one of the tokens."""
        if not self.tokens:
            return
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        if authorization is None or not authorization.startswith(_BEARER):
            raise Unauthenticated("the call carries no bearer token")
        given = authorization.removeprefix(_BEARER).strip().encode()
        # Every token is compared, each in constant time, so that time tells a caller nothing.
        if sum(hmac.compare_digest(given, token) for token in self.tokens) == 0:
            raise Unauthenticated("the call's bearer token is not one of this server's")


def bearer(token: str) -> tuple[str, str]:
    """The metadata entry that carries a token."""
    return "authorization", _BEARER + token


def load_tokens(path: Path) -> tuple[bytes, ...]:
    """One token a line; empty lines and those that begin with # are skipped. Raises ConfigError without any."""
    lines = (line.strip() for line in _read(path, "token file").splitlines())
    tokens = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not tokens:
        raise ConfigError(f"token file {path} holds no token")
    return tokens


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
