"""ListenAddress: the HOST:PORT that a gateway listens on."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from ....proto.errors import ConfigError


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
