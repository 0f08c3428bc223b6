"""EventStream: a response of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....proto.errors import ProtocolError, QuireError
from .calls import unless_client_leaves
from .errors import UNEXPECTED, ClientLeft

# Proxies close streams that are silent, most after 60 s. A comment is no event: clients skip it.
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must not hold events back
}

_log = logging.getLogger(__name__)


class EventStream(Response):
    """Sends chunks as they are made, without the tasks and copies of StreamingResponse.

    The status and the headers are sent with the first chunk, or with the first comment if that takes long. An error
    before them becomes a normal error response; a later one ends the stream as an event.

    Args:
        chunks: whole events as bytes; closed however the stream ends, at once when the client leaves.
        error_event: returns the event that tells the client of an error.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        error_event: Callable[[QuireError], bytes],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.body = b""
        self.background = None
        self.init_headers(_HEADERS | dict(headers))
        del self.headers["content-length"]  # of the empty body
        self._chunks = chunks
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(send, self.raw_headers)
        try:
            async with unless_client_leaves(receive), aclosing(self._chunks) as chunks:
                await self._send_all(body, chunks)
        except ClientLeft:
            return
        finally:
            body.stop_keep_alive()

    async def _send_all(self, body: _Body, chunks: AsyncGenerator[bytes, None]) -> None:
        try:
            async for chunk in chunks:
                await body.send(chunk)
        except QuireError as error:
            if not body.is_started:
                raise
            await body.send(self._error_event(error))
        except Exception:
            if not body.is_started:
                raise
            _log.exception("a stream failed unexpectedly")
            await body.send(self._error_event(ProtocolError(UNEXPECTED)))
        await body.end()


class _Body:
    """The body of one response, with comments while nothing else is sent."""

    def __init__(self, send: Send, raw_headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._raw_headers = raw_headers
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._on_timer)
        self._comment: asyncio.Task[None] | None = None
        self.is_started = False

    async def send(self, chunk: bytes) -> None:
        self._sent_at = self._loop.time()
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._raw_headers})
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        self.stop_keep_alive()
        if not self.is_started:
            await self.send(b"")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop_keep_alive(self) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _on_timer(self) -> None:
        silent_s = self._loop.time() - self._sent_at
        if silent_s >= KEEP_ALIVE_S and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self.send(KEEP_ALIVE))
            silent_s = 0.0
        self._timer = self._loop.call_later(max(0.1, KEEP_ALIVE_S - silent_s), self._on_timer)
