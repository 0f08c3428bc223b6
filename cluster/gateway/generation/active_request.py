"""ActiveRequest: a request of a gateway, the log of its events, and the calls that read them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from ....proto.errors import DeadlineExpired, InvalidRequest, QuireError, RequestNotFound
from ...os_utils.event_loop import run_in_background
from ...text.requests.output_processor import OutputProcessor
from ...text.requests.outputs import (
    CompletionDelta,
    OutputEvent,
    PromptLogprobsDelta,
    RequestStarted,
    StreamEvent,
)
from ...text.requests.request import Request
from ...text.requests.resume_position import ResumePosition
from ...text.requests.resumed_output import ResumedOutput
from ...text.requests.sequence_update import RequestStream
from ..routing.request_migration import MigratingRequest
from ..routing.served_models import ServedModel

# The scheduler ends a request at its deadline, and knows why it was late. The gateway does so this much later, if the
# scheduler does not answer.
EXPIRY_SLACK_S = 0.5

OnEnd = Callable[["ActiveRequest", BaseException | None], None]


# Estimates of an event's memory, measured with sys.getsizeof.
_EVENT_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 250, 8, 300


class ActiveRequest:
    """A request that ends with its last reader, or some time after it if it is resumable. For one event loop.

    Args:
        digest: digest of the call's content; empty for a call without a request_id.
        resume_window_s: time that a resumable request runs on without readers, within its deadline.
        on_end: called once, after the sequences have ended, with the error that ended the request or made its last
            reader leave. What is in the log can still be read.
    """

    def __init__(
        self,
        model: ServedModel,
        request: Request,
        stream: MigratingRequest,
        log: RequestLog,
        digest: bytes,
        resume_window_s: float,
        on_end: OnEnd,
    ) -> None:
        self.model = model
        self.request = request
        self.log = log
        self.digest = digest
        self._stream = stream
        self._resume_window_s = resume_window_s
        self._deadline = time.monotonic() + (math.inf if request.timeout_s is None else request.timeout_s)
        self._on_end = on_end
        self._is_resumable = False
        self._has_ended = False
        self._num_readers = 0
        self._orphan: asyncio.Task[None] | None = None  # reads on after the last reader has left
        self._expiry: asyncio.TimerHandle | None = None
        if request.timeout_s is not None:
            delay_s = request.timeout_s + EXPIRY_SLACK_S
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def join(self, *, is_resumable: bool) -> None:
        """Count a reader. The request stays resumable if any of its readers wanted that."""
        self._num_readers += 1
        self._is_resumable |= is_resumable
        if self._orphan is not None:
            self._orphan.cancel()
            self._orphan = None

    def leave(self, cause: BaseException | None) -> None:
        """Count a reader less, and end the request after the last one: at once, or if one may return, later.

        Args:
            cause: made the reader leave before the end; None if it wants no more.
        """
        self._num_readers -= 1
        if self._num_readers or self._has_ended:
            return
        if self._is_resumable and cause is not None and not self.log.has_ended:
            name = f"running {self.request.request_id} without a reader"
            self._orphan = run_in_background(self._run_without_reader(), name)
        else:
            self._end(cause)

    def stop(self, error: QuireError) -> None:
        """End the request with the error, for readers of now and later."""
        self._stream.end(error)

    async def wait_until_orphan_ended(self) -> None:
        """Return once the request does not run without a reader."""
        if self._orphan is not None:
            await asyncio.wait((self._orphan,))

    async def _run_without_reader(self) -> None:
        left_s = min(self._resume_window_s, self._deadline - time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self.log.finish()
        self._orphan = None
        self._end(asyncio.CancelledError())

    def _expire(self) -> None:
        self.stop(DeadlineExpired("the caller's deadline passed, and the request's replica does not answer"))

    def _end(self, cause: BaseException | None) -> None:
        self._has_ended = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._stream.abort()
        self._on_end(self, self.log.error if self.log.has_ended else cause)


class RequestLog:
    """Events of one request by number: RequestStarted has 0, and the events after it count from 1 without a gap.

    The reader that needs the next event takes the next update of the request. So updates merge while no reader waits,
    and an event that was given a number never changes. For one event loop.

    The log of a request that began at another gateway has the events after those that its client received there.

    Args:
        started: the event 0; None if the client has it.
        end: number of the first event, without `started`.
        resume_position: what the client has of the events before `end`.
        max_bytes: about how much of the past is kept for later readers, from the newest back. With 0 only the newest
            events are kept, for one reader.
        on_event: called once with each event after `started`.

    Attributes:
        has_ended: the last event is in the log, or `error` ended the request.
        error: see `has_ended`.
        begins_with_request: the first event is or was the request's first.
        num_bytes: estimated memory of the events, if any are kept.
    """

    def __init__(
        self,
        started: RequestStarted | None,
        stream: RequestStream,
        processor: OutputProcessor | ResumedOutput,
        *,
        end: int = 0,
        resume_position: ResumePosition | None = None,
        max_bytes: int = 0,
        on_event: Callable[[OutputEvent], None] = lambda event: None,
    ) -> None:
        self._stream = stream
        self._processor = processor
        self._max_bytes = max_bytes
        self._on_event = on_event
        self._updates = aiter(stream)
        self._events: list[StreamEvent] = [] if started is None else [started]
        self._first = end  # number of the oldest event that is kept
        self.begins_with_request = started is not None
        self._before_first = ResumePosition() if resume_position is None else resume_position.copy()
        self._pulling = asyncio.Lock()
        self.has_ended = False
        self.error: Exception | None = None
        self.num_bytes = _EVENT_BYTES

    @property
    def end(self) -> int:
        """Number of the next event."""
        return self._first + len(self._events)

    def has_sent(self, after: int, position: ResumePosition) -> bool:
        """Return whether a client with the events up to number `after` of this log has received this output."""
        if not self._first - 1 <= after < self.end:
            return False
        sent = self._before_first.copy()
        for event in self._events[: after + 1 - self._first]:
            sent.take(event)
        return sent == position

    async def read(self, after: int = -1) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Yield the events after the one with number `after`, with their numbers, until the request has ended.

        Raises:
            InvalidRequest: there is no event with that number yet.
            RequestNotFound: the next event to yield is not kept any more.
            QuireError: the error that ended the request.
        """
        if after >= self.end:
            raise InvalidRequest(
                "after_sequence_number", f"is {after}, but the last event so far has {self.end - 1}"
            )
        number = after + 1
        while True:
            while number < self.end:
                yield number, self._event(number)
                number += 1
            if self.error is not None:
                raise self.error
            if self.has_ended:
                return
            await self._pull(number)

    async def finish(self) -> None:
        """Read the request to its end, for readers to come."""
        while not self.has_ended:
            await self._pull(self.end)

    def _event(self, number: int) -> StreamEvent:
        if number < self._first:
            raise RequestNotFound(
                f"event {number} is not kept any more; the oldest one that is has number {self._first}"
            )
        return self._events[number - self._first]

    async def _pull(self, number: int) -> None:
        """Return once there is an event with this number, or there can be none. A canceled call loses no event."""
        async with self._pulling:
            if number < self.end or self.has_ended:  # another reader has pulled it
                return
            try:
                index, update = await anext(self._updates)
                events = self._processor.process(index, update)
            except StopAsyncIteration:
                self.has_ended = True
                return
            except Exception as error:
                self.error, self.has_ended = error, True
                return
            self._append(events)
            if self._processor.has_stop_string(index):
                self._stream.stop(index)
            self.has_ended = self._processor.is_finished

    def _append(self, events: list[OutputEvent]) -> None:
        if events and self._max_bytes:
            self._trim()
            self.num_bytes += sum(map(_num_bytes, events))
        elif events:
            self._drop(len(self._events))
        self._events += events
        for event in events:
            self._on_event(event)

    def _trim(self) -> None:
        """Drop the older half of the events if they are too large."""
        if self.num_bytes > self._max_bytes:
            num_dropped = (len(self._events) + 1) // 2
            self.num_bytes -= sum(map(_num_bytes, self._events[:num_dropped]))
            self._drop(num_dropped)

    def _drop(self, num_dropped: int) -> None:
        if self._max_bytes:
            for event in self._events[:num_dropped]:
                self._before_first.take(event)
        del self._events[:num_dropped]
        self._first += num_dropped


def _num_bytes(event: StreamEvent) -> int:
    if not isinstance(event, CompletionDelta | PromptLogprobsDelta):
        return _EVENT_BYTES
    num_logprobs = len(event.logprobs) * len(event.logprobs[-1]) if event.logprobs else 0
    text_len = len(event.text) if isinstance(event, CompletionDelta) else 0
    return _EVENT_BYTES + 4 * text_len + _TOKEN_BYTES * len(event.token_ids) + _LOGPROB_BYTES * num_logprobs
