"""ActiveRequest: a request of a gateway and the calls that read it, until the last of them has left."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

from ....proto.errors import DeadlineExpired, QuireError
from ...os_utils.event_loop import run_in_background
from ...text.requests.request import Request
from ..routing.request_migration import MigratingRequest
from ..routing.served_models import ServedModel
from .request_log import RequestLog

# The scheduler ends a request at its deadline, and knows why it was late. The gateway does so this much later, if the
# scheduler does not answer.
EXPIRY_SLACK_S = 0.5

OnEnd = Callable[["ActiveRequest", BaseException | None], None]


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
