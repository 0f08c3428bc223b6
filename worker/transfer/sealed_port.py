"""SealedPort: a TCP port whose connections are admitted by a token, and encrypted with a key that came with it."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from ...proto.errors import ProtocolError
from .messages import StreamOffer
from .sealed_stream import KEY_BYTES, SealedStream

# Connections for streams, and offers of such that were not taken up.
MAX_STREAMS = 16
MAX_OFFERS = 256
_TOKEN_BYTES = 16
# A connection that sends no token for so long is closed.
_TOKEN_TIMEOUT_S = 2.0
# After a connection could not be accepted, the next one is tried after this time.
_RETRY_S = 0.2
# A stream that is not connected within this time is done without, for instance behind a firewall.
CONNECT_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


def connect_stream(host: str, offer: StreamOffer, max_bytes: int) -> SealedStream | None:
    """Return a stream to a port; None if it cannot be connected."""
    try:
        connection = socket.create_connection((host, offer.port), CONNECT_TIMEOUT_S)
    except OSError:
        return None
    try:
        connection.sendall(offer.token)
        return SealedStream(connection, offer.key, is_server=False, max_bytes=max_bytes)
    except (OSError, ValueError):
        connection.close()
        return None


class SealedPort:
    """A port for streams, and a thread for each connection.

    Args:
        serve: answers the requests of a stream, in its thread.
        max_bytes: of a frame that is accepted.
        run: runs the body of a thread.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(
        self,
        host: str,
        serve: Callable[[SealedStream], None],
        max_bytes: int,
        run: Callable[[Callable[[], None]], None] = lambda body: body(),
    ) -> None:
        self._serve, self._max_bytes, self._run = serve, max_bytes, run
        self._lock = threading.Lock()  # guards what follows
        self._offers: OrderedDict[bytes, bytes] = OrderedDict()  # token |-> key
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family, backlog=MAX_STREAMS)
        self._thread = threading.Thread(target=self._accept, name="kv-streams", daemon=True)
        self._thread.start()

    def offer(self) -> StreamOffer:
        """Return a token and a key for one connection."""
        token, key = secrets.token_bytes(_TOKEN_BYTES), secrets.token_bytes(KEY_BYTES)
        with self._lock:
            self._offers[token] = key
            if len(self._offers) > MAX_OFFERS:
                self._offers.popitem(last=False)
        return StreamOffer(self._port.getsockname()[1], token, key)

    def close(self) -> None:
        """Close the port and all connections, and wait for their threads."""
        with self._lock:
            self._closed.set()
            connections = dict(self._open)
        for connection in (self._port, *connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in connections.values():
            thread.join()
        self._port.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._port.accept()
            except OSError:  # closed, or the process has too many files open
                if self._closed.wait(_RETRY_S):
                    return
                continue
            thread = threading.Thread(
                target=self._run,
                args=(lambda own=connection: self._handle(own),),
                name="kv-stream",
                daemon=True,
            )
            with self._lock:
                is_welcome = len(self._open) < MAX_STREAMS and not self._closed.is_set()
                if is_welcome:
                    self._open[connection] = thread
                    thread.start()
            if not is_welcome:
                connection.close()

    def _handle(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_TOKEN_TIMEOUT_S)
            token = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            with self._lock:
                key = self._offers.pop(token, None)
            if key is not None:
                self._serve(SealedStream(connection, key, is_server=True, max_bytes=self._max_bytes))
        except (OSError, ValueError, ProtocolError) as error:
            _log.debug("a stream ended: %s", error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()
