"""HttpCaller: sends one JSON request at a time over a kept connection, and retries what may succeed later."""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ....proto.errors import ConfigError, ServerUnreachable, in_one_line
from ...os_utils.closing import Closing

# Statuses with which the same request may succeed later.
_RETRIABLE = frozenset({429, 502, 503, 504})
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """An HTTP server and how to call it.

    Attributes:
        url: for example ``http://127.0.0.1:8000``.
        tls: for https; None for the system's authorities.
        timeout_s: limit of one request.
        retry_s: a request is retried for this long before the server counts as unreachable.
    """

    url: str
    token: str | None = None
    tls: ssl.SSLContext | None = None
    timeout_s: float = 3600.0
    retry_s: float = 300.0
    host: str = field(init=False)
    port: int | None = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"url is {self.url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query:
            raise ConfigError(f"url is {self.url!r}, must be like http://127.0.0.1:8000, without a path")
        for name, value in {"host": host, "port": port}.items():
            object.__setattr__(self, name, value)

    @property
    def is_https(self) -> bool:
        return self.url.startswith("https://")


class HttpCaller(Closing):
    """One connection to a server, for one thread."""

    def __init__(self, server: Server, stop: threading.Event) -> None:
        self._server = server
        self._stop = stop
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON of the response; retry while the server is busy or away.

        Raises:
            ServerUnreachable: for `retry_s` it was busy or away, or the batch is stopped.
        """
        deadline = time.monotonic() + self._server.retry_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                status, wait_s, content = self._post_once(path, body)
                if status not in _RETRIABLE:
                    return status, content
                reason = f"HTTP status {status}"
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if type(error) is http.client.BadStatusLine:
                    raise ConfigError(
                        f"{self._server.url} does not speak HTTP/1.1, must be the address of an HTTP server, by "
                        "default on port 8000"
                    ) from error
                reason, wait_s = in_one_line(error), None
            if time.monotonic() >= deadline:
                raise ServerUnreachable(
                    f"{self._server.url} did not answer in {self._server.retry_s:g} s: {reason}"
                )
            # Spread, so that all callers of a restarted server do not come at once.
            if self._stop.wait(max(wait_s or 0.0, delay_s * random.uniform(0.5, 1.0))):
                raise ServerUnreachable("the batch was stopped")
            delay_s = min(_MAX_DELAY_S, 2 * delay_s)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _post_once(self, path: str, body: Any) -> tuple[int, float | None, Any]:
        """Return status, seconds of the header Retry-After, and JSON of the response."""
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        if self._server.token is not None:
            headers["Authorization"] = f"Bearer {self._server.token}"
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        return response.status, _seconds(response.getheader("Retry-After")), _read_json(content)

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            server = self._server
            if server.is_https:
                self._connection = http.client.HTTPSConnection(
                    server.host, server.port, timeout=server.timeout_s, context=server.tls
                )
            else:
                self._connection = http.client.HTTPConnection(
                    server.host, server.port, timeout=server.timeout_s
                )
        return self._connection


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _read_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
