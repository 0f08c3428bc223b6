"""What every `quire serve` has in front: an address, who may call it, and a log."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from ...proto.errors import ConfigError
from ..api.security import ListenAddress, Security


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What an operator may choose of a gateway.

    Attributes:
        listen: ``HOST:PORT`` of the gateway; port 0: the system chooses.
        insecure: allow an address that others can reach without TLS and tokens.
        tls_cert, tls_key: PEM files.
        token_file: bearer tokens that clients must have one of, one a line, as ``TOKEN`` or ``TENANT:TOKEN``. Those
            of the tenant ``admin`` may change a fleet.
    """

    listen: str = "127.0.0.1:50051"
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    def security(self) -> Security:
        """Raises ConfigError on a file that cannot be used."""
        return Security.load(tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file)


def check_listen(text: str, security: Security, insecure: bool) -> None:
    """Refuses an address before anything is started; the gateway itself checks again."""
    address = ListenAddress.parse(text)
    security.check_listen(address, insecure=insecure)
    try:
        socket.create_server((address.host, address.port), family=_family(address)).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error


def _family(address: ListenAddress) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
