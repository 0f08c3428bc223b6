"""ResponseStore: the responses that a gateway makes in the background and keeps, so that clients fetch them later."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ....proto.errors import (
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QuireError,
    QuotaExceeded,
    RequestNotFound,
)
from ...os_utils.event_loop import ChangeNotifier
from ..generation.generation import Generation
from ..generation.retention import RequestKey, RetainedRequests, RetentionLimits
from .errors import UNEXPECTED
from .json_bodies import json_bytes
from .response_stream import Item, ResponseBuilder, assistant_message, message_items
from .schema.response_request import Message

# Kept in memory, by the gateway that made them.
RETENTION = RetentionLimits(
    retention_s=3600.0, max_requests=1024, max_bytes=32 << 20, max_total_bytes=128 << 20
)

# Responses in the background hold no connection, so that nothing else limits them.
MAX_BACKGROUND = 256
# Events that a response keeps; a delta of one token has some 200 bytes.
MAX_EVENT_BYTES = 8 << 20

_BROKEN_OFF = "failed", "cancelled"

_log = logging.getLogger(__name__)


class EventLog:
    """Events by their sequence numbers, from 0 on. For one event loop.

    Attributes:
        num_bytes: memory of the events that are kept.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._is_dropped = self._has_ended = False
        self._changes = ChangeNotifier()

    def add(self, chunk: bytes) -> None:
        """Add whole events. If they are too many, all are dropped."""
        events = [b"%b\n\n" % event for event in chunk.split(b"\n\n") if event]
        self.num_bytes += sum(map(len, events))
        self._events += events
        if self._is_dropped or self.num_bytes > self._max_bytes:
            self._is_dropped = True
            self._events.clear()
            self.num_bytes = 0
        self._changes.notify()

    def end(self) -> None:
        """Let readers end after the last event."""
        self._has_ended = True
        self._changes.notify()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after this sequence number, those of a running response as they are made.

        Raises:
            RequestNotFound: the events were too many to be kept.
        """
        position = after + 1
        while True:
            if self._is_dropped:
                raise RequestNotFound(
                    f"the response has more than {self._max_bytes} bytes of events; fetch it whole"
                )
            if events := self._events[position:]:
                position += len(events)
                yield b"".join(events)
            elif self._has_ended:
                return
            else:
                await self._changes.wait()


class BackgroundResponse:
    """One response and the task that makes it. For one event loop.

    Args:
        builder: makes the response, without events.
        cleanup: left when the response has ended.
        on_end: called then.

    Attributes:
        events: the events of its stream.
    """

    def __init__(
        self,
        builder: ResponseBuilder,
        generation: Generation,
        cleanup: AsyncExitStack,
        on_end: Callable[[BackgroundResponse], None],
    ) -> None:
        self.events = EventLog()
        self._builder = builder
        self._on_end = on_end
        self.events.add(builder.queued())
        self._task = asyncio.create_task(self._run(generation, cleanup))

    @property
    def response(self) -> dict[str, Any]:
        """The response as far as it is made."""
        return self._builder.response

    async def cancel(self) -> None:
        """End the response and its request; returns when it has ended."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, generation: Generation, cleanup: AsyncExitStack) -> None:
        try:
            async with cleanup:
                async for event in generation.events:
                    self.events.add(self._builder.event(event))
        except asyncio.CancelledError:
            self._builder.cancel()
        except QuireError as error:
            self.events.add(self._builder.failed(error))
        except Exception:
            _log.exception("a response failed unexpectedly")
            self.events.add(self._builder.failed(ProtocolError(UNEXPECTED)))
        finally:
            self.events.end()
            self._on_end(self)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A complete response and the conversation up to it.

    Attributes:
        events: the events of its stream; None unless it was made in the background.
    """

    response: dict[str, Any]
    messages: list[Message]
    events: EventLog | None = None


class ResponseStore:
    """(tenant, id) |-> response, of those that run in the background and of complete ones. For one event loop."""

    def __init__(self) -> None:
        self._stored: RetainedRequests[StoredResponse] = RetainedRequests(RETENTION)
        self._running: dict[RequestKey, BackgroundResponse] = {}
        self._slots: Counter[str] = Counter()

    @contextmanager
    def slot(self, tenant: str) -> Iterator[None]:
        """Hold a slot for a response in the background.

        A tenant may hold as many as are free: half of them if it is alone, and there are some for any further tenant.

        Raises:
            Overloaded: no slot is free.
            QuotaExceeded: the tenant holds as many as are free.
        """
        num_free, num_held = MAX_BACKGROUND - self._slots.total(), self._slots[tenant]
        if num_free <= 0:
            raise Overloaded(f"{MAX_BACKGROUND} responses run in the background, which is the limit")
        if num_held >= num_free:
            raise QuotaExceeded(tenant, "background_responses", num_held)
        self._slots[tenant] += 1
        try:
            yield
        finally:
            self._slots -= Counter([tenant])  # without tenants that hold none

    def add_running(self, key: RequestKey, running: BackgroundResponse) -> None:
        self._running[key] = running

    def remove_running(self, key: RequestKey) -> None:
        self._running.pop(key, None)

    def put(
        self,
        key: RequestKey,
        messages: list[Message],
        response: dict[str, Any],
        events: EventLog | None = None,
    ) -> None:
        """Keep a complete response.

        Args:
            messages: the conversation without the response.
        """
        stored = StoredResponse(response, [*messages, assistant_message(response)], events)
        num_bytes = len(json_bytes(response)) + len(json_bytes(stored.messages))
        self._stored.put(key, stored, num_bytes + (0 if events is None else events.num_bytes))

    def response(self, key: RequestKey) -> dict[str, Any]:
        """Return the response as far as it is made. Raises RequestNotFound for one that is not kept."""
        if (running := self._running.get(key)) is not None:
            return running.response
        return self._complete(key).response

    def events(self, key: RequestKey) -> EventLog:
        """Return the events of a response that was made in the background.

        Raises:
            RequestNotFound: it is not kept.
            InvalidRequest: it was not made in the background.
        """
        if (running := self._running.get(key)) is not None:
            return running.events
        events = self._complete(key).events
        if events is None:
            raise InvalidRequest("stream", "needs a response that was created with background")
        return events

    def conversation(self, key: RequestKey) -> list[Message]:
        """Return the messages up to the end of a complete response.

        Raises:
            RequestNotFound: it is not kept.
            InvalidRequest: it is not complete.
        """
        status = self.response(key)["status"]
        if key in self._running or status in _BROKEN_OFF:
            raise InvalidRequest("previous_response_id", f"is a response that is {status}")
        return self._complete(key).messages

    def input_items(self, key: RequestKey) -> list[Item]:
        """Return what a complete response answers, as items. Raises RequestNotFound if it is not kept."""
        return list(message_items(key[1], self._complete(key).messages[:-1]))

    async def cancel(self, key: RequestKey) -> dict[str, Any]:
        """End a response that runs in the background; return it.

        Raises:
            RequestNotFound: it is not kept.
            InvalidRequest: it was not made in the background.
        """
        if (running := self._running.get(key)) is not None:
            await running.cancel()
            return running.response
        stored = self._complete(key)
        if stored.events is None:
            raise InvalidRequest("response_id", "is not of a response that was created with background")
        return stored.response

    async def discard(self, key: RequestKey) -> None:
        """Drop a response, and end it if it runs. Raises RequestNotFound for one that is not kept."""
        if (running := self._running.get(key)) is not None:
            await running.cancel()
        else:
            self._complete(key)
        self._stored.discard(key)

    def _complete(self, key: RequestKey) -> StoredResponse:
        stored = self._stored.get(key)
        if stored is None:
            raise RequestNotFound(f"response {key[1][:100]!r} is not kept here, or not any more")
        return stored
