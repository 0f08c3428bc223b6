"""Who may listen where, and who may call: addresses, TLS and bearer tokens."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from ...proto.errors import ConfigError, InvalidRequest, Unauthenticated

# Whose tokens may change a fleet.
ADMIN_TENANT = "admin"

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
class Token:
    """A bearer token.

    Attributes:
        tenant: whose calls carry it; None: it does not say.
    """

    secret: bytes
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Security:
    """What a gateway asks of its callers.

    Attributes:
        certificate: PEM chain and key that the gateway shows; None: calls come in the clear.
        tokens: a call must carry one of these; empty: it need not.
    """

    certificate: tuple[bytes, bytes] | None = None
    tokens: tuple[Token, ...] = ()

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

    def check_call(self, authorization: str | bytes | None) -> Token | None:
        """The token that a call's ``authorization`` metadata carries; None where none is asked for.

        Raises:
            Unauthenticated: it carries none of the tokens.
        """
        if not self.tokens:
            return None
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        if authorization is None or not authorization.startswith(_BEARER):
            raise Unauthenticated("the call carries no bearer token")
        given = authorization.removeprefix(_BEARER).strip().encode()
        # Every token is compared, each in constant time, so that time tells a caller nothing.
        matching = [token for token in self.tokens if hmac.compare_digest(given, token.secret)]
        if not matching:
            raise Unauthenticated("the call's bearer token is not one of this server's")
        return matching[0]

    def tenant(self, authorization: str | bytes | None, claimed: str) -> str:
        """Whose call it is: its token's tenant; where that says none, the one that the request claims.

        Raises:
            InvalidRequest: the request claims the tenant of another token.
            Unauthenticated: as `check_call`.
        """
        token = self.check_call(authorization)
        own = None if token is None else token.tenant
        taken = {other.tenant for other in self.tokens if other.tenant is not None}
        if claimed and claimed != own and (own is not None or claimed in taken):
            raise InvalidRequest("tenant", f"is {claimed!r}, which the call's token is not of")
        return claimed if own is None else own


def bearer(token: str) -> tuple[str, str]:
    """The metadata entry that carries a token."""
    return "authorization", _BEARER + token


def load_tokens(path: Path) -> tuple[Token, ...]:
    """One ``TOKEN`` or ``TENANT:TOKEN`` a line; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, holds no token, or a line of it is neither.
    """
    lines = enumerate((line.strip() for line in _read(path, "token file").splitlines()), start=1)
    tokens = tuple(
        _parse_token(line, f"token file {path}, line {number}")
        for number, line in lines
        if line and not line.startswith(b"#")
    )
    if not tokens:
        raise ConfigError(f"token file {path} holds no token")
    return tokens


def _parse_token(line: bytes, where: str) -> Token:
    tenant, colon, secret = (part.strip() for part in line.partition(b":"))
    if not colon:
        return Token(line)
    if not tenant or not secret:
        raise ConfigError(f"{where}: must be TOKEN or TENANT:TOKEN")
    try:
        return Token(secret, tenant.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: the tenant's name is not UTF-8") from None


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
