"""Health check of a container: exit status 0 if its HTTP server answers /health with 200. Standard library only."""

from __future__ import annotations

import http.client
import os
import ssl
import sys

_TIMEOUT_S = 8.0


def main() -> int:
    # The option --http, which a container may also get on its command line; its port is then QUIRE_HEALTH_PORT.
    port = int(
        os.environ.get("QUIRE_HEALTH_PORT") or os.environ.get("QUIRE_HTTP", ":8000").rpartition(":")[2]
    )
    for connect in (http.client.HTTPConnection, _encrypted):
        try:
            connection = connect("127.0.0.1", port, timeout=_TIMEOUT_S)
            connection.request("GET", "/health")
            return 0 if connection.getresponse().status == 200 else 1
        except (http.client.HTTPException, ssl.SSLError, ConnectionResetError) as error:
            problem: Exception = error  # a server with TLS, which refuses a plain request
        except OSError as error:
            print(f"127.0.0.1:{port}: {error}", file=sys.stderr)
            return 1
    print(f"127.0.0.1:{port}: {problem}", file=sys.stderr)
    return 1


def _encrypted(host: str, port: int, timeout: float) -> http.client.HTTPSConnection:
    """Return a connection to a server on loopback, whose certificate names the public host."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)


if __name__ == "__main__":
    sys.exit(main())
