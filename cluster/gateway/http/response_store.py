"""ResponseStore: the responses that a gateway keeps, so that clients continue, fetch and stream them later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....proto.errors import InvalidRequest, RequestNotFound
from ..generation.retention import RequestKey, RetainedRequests, RetentionLimits
from .background_response import BackgroundResponse
from .event_log import EventLog
from .json_text import json_text
from .response_stream import assistant_message
from .schema.response_request import Message

# Kept in memory, by the gateway that made them.
RETENTION = RetentionLimits(
    retention_s=3600.0, max_requests=1024, max_bytes=32 << 20, max_total_bytes=128 << 20
)

_BROKEN_OFF = "failed", "cancelled"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A complete response and the conversation up to it.

    Attributes:
        events: of its stream; None unless it was made in the background.
    """

    response: dict[str, Any]
    messages: list[Message]
    events: EventLog | None = None


class ResponseStore:
    """(tenant, id) |-> response, of those that run in the background and of complete ones. For one event loop."""

    def __init__(self) -> None:
        self._stored: RetainedRequests[StoredResponse] = RetainedRequests(RETENTION)
        self._running: dict[RequestKey, BackgroundResponse] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

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
        num_bytes = len(json_text(response)) + len(json_text(stored.messages))
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
