"""HttpConnection: one client's connection, with limits on its headers, on how slow it may be and on its work."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ....proto.errors import InvalidRequest, Overloaded, QuireError
from ...os_utils.descriptors import max_connections
from .errors import error_body

# Headers that the server, its endpoints or their frameworks read; the others do not reach the application, where a
# framework may parse them although no endpoint asks. FastAPI reads cookies for every call: Python before 3.11.10 took
# 24.5 s to unquote one of 64 kB (CVE-2024-7592).
HEADERS_READ = frozenset(
    {
        b"accept",
        b"access-control-request-headers",
        b"access-control-request-method",
        b"authorization",
        b"connection",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"last-event-id",
        b"origin",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"x-api-key",
        b"x-request-id",
        b"x-request-timeout",
    }
)
# Bytes that are parsed at once, between two checks of the limits.
_PART = 16 << 10
# Bytes on the wire for each byte of a body that comes in chunks of one byte.
_CHUNKED_BYTE = len(b"1\r\nx\r\n")
# Parts of work in one turn of the event loop. Each parses 16 kB at most, and starts or wakes one request at most,
# whose endpoint may take a millisecond. 8,000 requests that arrived together held up all streams for 9.5 s.
MAX_PER_TURN = 8


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of each connection.

    Attributes:
        max_head_bytes: size of the request line and all headers. What surrounds a body in chunks, the trailers and
            the extensions of chunks, may have as many bytes as well.
        max_url_bytes: size of the path and the query. FastAPI takes 5 ms to read a query of 8 kB.
        max_value_bytes: size of each header that is read. Python reads no number of more than 4,300 digits, and a
            length may begin with zeros.
        head_timeout_s: time for a request's headers to arrive, from the connection or the request's first byte.
        body_timeout_s: time for the body to arrive after the headers.
        write_timeout_s: time that a client may leave a full send buffer unread.
        keep_alive_s: time that a connection may be idle between requests.
        vanished_s: time until a client whose machine vanished is detected.
        max_pipelined: requests that a client may send before the response to an earlier one is complete; their bodies
            together may have HIGH_WATER_LIMIT bytes.
        max_connections: connections at once; also limited to half of the process's file descriptors.
    """

    max_head_bytes: int = 64 << 10
    max_url_bytes: int = 8 << 10
    max_value_bytes: int = 4 << 10
    head_timeout_s: float = 20.0
    body_timeout_s: float = 120.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    vanished_s: float = 40.0
    max_pipelined: int = 8
    max_connections: int = 16_384

    def num_connections(self) -> int:
        """Return the number of connections that the process can hold."""
        return max_connections(self.max_connections)


class PacedWork:
    """Runs work at once while the turn of the event loop has room for it, and otherwise in later turns.

    Work runs in the order in which it came. For one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_left = MAX_PER_TURN
        self._is_turn_counted = False

    def run(self, work: Callable[[], None]) -> None:
        """Run the work now or soon."""
        self._waiting.append(work)
        self._count_turn()
        self._run_waiting()

    def _count_turn(self) -> None:
        if not self._is_turn_counted:
            self._is_turn_counted = True
            asyncio.get_running_loop().call_soon(self._on_next_turn)

    def _on_next_turn(self) -> None:
        self._is_turn_counted = False
        self._num_left = MAX_PER_TURN
        if self._waiting:
            self._count_turn()
            self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._num_left:
            self._num_left -= 1
            self._waiting.popleft()()


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits, which answers what it refuses in OpenAI's form.

    Args:
        on_refused: receives the error of each request that is refused here.
        paced: runs the work of all connections.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        limits: ConnectionLimits,
        on_refused: Callable[[QuireError], None],
        paced: PacedWork,
    ) -> None:
        super().__init__(config, server_state, app_state={})
        self._limits = limits
        self._on_refused = on_refused
        self._paced = paced
        self._unparsed = bytearray()
        self._max_connections = limits.num_connections()
        self._running: RequestResponseCycle | None = None  # `cycle` is that of the latest request
        self._is_in_head = False
        self._num_other_bytes = 0  # since the last byte of a body, or more of them than its chunks explain
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _detect_vanished_peer(transport, self._limits.vanished_s)
        if len(self.connections) > self._max_connections:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, Overloaded("too many connections are open; retry later")
            )
        else:
            self._expect("headers", self._limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_receive_timer()
        self._cancel_write_timer()
        self._unparsed.clear()
        self._paced.run(functools.partial(self._end_requests, exc))

    def _end_requests(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        if self._running is not None:
            self.cycle = self._running  # learns that the client has left
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused; further data would be parsed as another request
            return
        if self._receive_timer is None:  # ends uvicorn's keep-alive timeout
            self._expect("headers", self._limits.head_timeout_s)
        self._unset_keepalive_if_required()
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if not is_waiting:
            self._paced.run(self._parse_part)
        if self._unparsed:
            self.transport.pause_reading()

    def _parse_part(self) -> None:
        part = bytes(self._unparsed[:_PART])
        del self._unparsed[:_PART]
        if not part:  # the connection has ended
            return
        self._parse(part)
        if self.transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed:
            self._paced.run(self._parse_part)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_other_bytes = 0
        if len(self.pipeline) >= self._limits.max_pipelined:
            self._stop_pipelining()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            problem = f"exceeds {self._limits.max_url_bytes} bytes"
            self._stop_parsing(HTTPStatus.REQUEST_URI_TOO_LONG, InvalidRequest("URL", problem))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if not self._is_in_head or name not in HEADERS_READ:  # trailers are ignored
            return
        if len(value) > self._limits.max_value_bytes:
            problem = f"exceeds {self._limits.max_value_bytes} bytes"
            self._stop_parsing(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, InvalidRequest(name.decode("latin-1"), problem)
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # parsed again without the offer
        self._is_in_head = False
        self._num_other_bytes = 0
        self.server_state.default_headers = _default_headers(int(time.time()))
        self._expect("body", self._limits.body_timeout_s)
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn has paused it, so that nobody would see the client leave

    def on_body(self, body: bytes) -> None:
        self._num_other_bytes -= _CHUNKED_BYTE * len(body)
        super().on_body(body)
        if sum(len(cycle.body) for cycle, _ in self.pipeline) > HIGH_WATER_LIMIT:
            self._stop_pipelining()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._cancel_receive_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        start = functools.partial(super()._start_asgi_task, cycle, app)
        self._paced.run(lambda: None if cycle.disconnected else start())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_write_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, InvalidRequest("request", "is not valid HTTP/1.1"))

    def _expect(self, part: str, timeout_s: float) -> None:
        """Refuse the request unless the part arrives in time."""
        self._cancel_receive_timer()
        error = InvalidRequest(part, f"did not arrive in {timeout_s:g} s")
        self._receive_timer = self.loop.call_later(timeout_s, self._refuse, HTTPStatus.REQUEST_TIMEOUT, error)

    def _parse(self, part: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            self.parser.feed_data(part)
        except HttpParserError:
            self.send_400_response("")
        except HttpParserUpgrade as upgrade:
            (num_parsed,) = upgrade.args
            self._ignore_upgrade(part[num_parsed:])
        self._num_other_bytes = max(0, self._num_other_bytes + len(part))
        if self._num_other_bytes > self._limits.max_head_bytes:
            part_of_request = "headers" if self._is_in_head else "trailers and chunk extensions"
            error = InvalidRequest(part_of_request, f"exceed {self._limits.max_head_bytes} bytes")
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, error)

    def _stop_pipelining(self) -> NoReturn:
        error = InvalidRequest(
            "request", "is one of too many before the response to an earlier one is complete"
        )
        self._stop_parsing(HTTPStatus.BAD_REQUEST, error)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again as one that offers no other protocol: the parser takes its body for that protocol.

        Java's HttpClient offers h2c with every first request (RFC 9110, 7.8: a server may ignore it).

        Args:
            rest: what has been received after the head.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers]  # Upgrade is not one that is read
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._parse(b"\r\n".join([*lines, b"", rest]))

    def _stop_parsing(self, status: HTTPStatus, error: QuireError) -> NoReturn:
        """Refuse the request from within a callback of the parser, which ends it as if the request were malformed."""
        self._refuse(status, error)
        raise error

    def _refuse(self, status: HTTPStatus, error: QuireError) -> None:
        """Answer without the application, and close the connection."""
        if self.transport.is_closing():
            return
        self._on_refused(error)
        cycle = self._open_cycle
        if cycle is not None and not cycle.more_body:
            self.transport.abort()  # an earlier request runs, whose response is awaited first
        else:
            self.end(error, status)

    @property
    def _open_cycle(self) -> RequestResponseCycle | None:
        """The request that runs: its response is not complete."""
        return None if self._running is None or self._running.response_complete else self._running

    def end(self, error: QuireError, status: HTTPStatus) -> None:
        """Close the connection, with the error as the response to the request if it has none yet."""
        if self.transport.is_closing():
            return
        cycle = self._open_cycle
        if cycle is not None and cycle.response_started:
            self.transport.abort()  # nothing can be said inside a response
            return
        body = error_body(error, "" if cycle is None else cycle.scope["path"], status)
        headers = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*headers, "", ""]).encode() + body)
        self.transport.close()

    def _cancel_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


@functools.lru_cache(1)
def _default_headers(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


def _detect_vanished_peer(transport: asyncio.Transport, after_s: float) -> None:
    """Let the kernel end a connection to a machine that no longer answers, idle or with data on the way."""
    opened: Any = transport.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(after_s * 3 / 4)))
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(after_s / 4)))
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(after_s * 1000))
