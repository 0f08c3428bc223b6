"""ResumableCall: a generation that continues after its connection broke, for Client and AsyncClient alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from ...proto import inference_pb2
from ...proto.errors import QuireError, RequestNotFound, ServerUnreachable, ShuttingDown
from ..os_utils.backoff import Backoff
from ..text.requests.outputs import CompletionDelta, CompletionFinished, PromptLogprobsDelta
from ..text.requests.resume_position import ResumePosition
from .servers import Servers
from .wire.grpc_status import from_grpc_error
from .wire.request_messages import resume_position_to_message

if TYPE_CHECKING:
    from .calls import Call

# Failed connections in a row, without a new event. With their delays they take 7 s, less than a server's window.
MAX_FAILURES = 8
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0

T = TypeVar("T")


class ResumableCall(Generic[T]):
    """A generation across its connections. Decides if and when to connect again; waits for nothing itself.

    A server runs a request once however often a call with its request_id is sent, so sending it again is safe.
    Another server continues it after what was received.

    Args:
        call: Generate or GenerateStream; it is resumed if its request is marked as resumable.
        servers: the next one is tried when one cannot be reached, or shuts down.
        clock: monotonic time in seconds.
    """

    def __init__(self, call: Call[T], servers: Servers, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._request: inference_pb2.GenerateRequest = call.request
        self._servers = servers
        self._server = servers.selected
        self._clock = clock
        timeout_s = call.options["timeout"]
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._is_resumable = bool(self._request.resumable)
        self._last: int | None = None  # number of the last event received
        self._position = ResumePosition()
        self._broken_by: QuireError | None = None
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)

    @property
    def must_abort(self) -> bool:
        """The server has to be told if the caller loses interest: it keeps a resumable request running."""
        return self._is_resumable

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        return self._request

    def start(self) -> Any:
        """Send the request; see `Call.start`."""
        self._server = self._servers.selected
        return self._call.method(self._request, **{**self._call.options, "timeout": self._time_left_s()})

    def read(self, message: Any) -> T:
        """Convert a response, or the next event of a stream.

        Raises:
            ServerUnreachable: the server does not continue where the last connection ended.
        """
        if isinstance(message, inference_pb2.GenerateEvent):
            self._take_number(message.sequence_number)
        event = self._call.read(message)
        if self._is_resumable and isinstance(
            event, CompletionDelta | CompletionFinished | PromptLogprobsDelta
        ):
            self._position.take(event)
        return event

    def delay_after(self, error: grpc.RpcError) -> float:
        """Return the seconds after which to connect again.

        Raises:
            QuireError: the call has failed: by the server's error, or by its connection if the call cannot be sent
                again or was sent often enough.
        """
        failure = from_grpc_error(error, self._servers.targets[self._server])
        if isinstance(failure, RequestNotFound) and self._broken_by is not None:
            raise ServerUnreachable(f"{self._broken_by}; it cannot be resumed: {failure}") from error
        if not self._may_send_again(failure, error):
            raise failure from error
        self._broken_by = failure
        self._servers.leave(self._server)
        self._request.received.CopyFrom(resume_position_to_message(self._position))
        delay_s, left_s = self._backoff.fail(self._clock()), self._time_left_s()
        if self._backoff.num_failures > MAX_FAILURES or (left_s is not None and left_s <= delay_s):
            raise failure from error
        return delay_s

    def _may_send_again(self, failure: QuireError, error: grpc.RpcError) -> bool:
        has_others = len(self._servers) > 1
        if not self._is_resumable:
            return False
        if isinstance(failure, ShuttingDown):
            return has_others
        # A single server that never answered: its address is wrong, or no server runs there.
        is_known = has_others or self._broken_by is not None or not was_never_connected(error)
        return isinstance(failure, ServerUnreachable) and is_known

    def _take_number(self, number: int) -> None:
        expected = 0 if self._last is None else self._last + 1
        if number == expected:
            self._last = number
            self._request.after_sequence_number = number
            self._backoff.reset()
        elif self._broken_by is None:  # a server of an earlier version, which does not number its events
            self._is_resumable = False
        else:
            raise ServerUnreachable(
                f"{self._broken_by}; the server sent event {number} instead of {expected}"
            )

    def _time_left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())


def was_never_connected(error: grpc.RpcError) -> bool:
    """Return whether there was no connection that could break: the address is wrong, or no server runs there."""
    details = (error.details() or "").lower()
    has_broken = "socket closed" in details or "reset" in details
    return not has_broken and ("failed to connect" in details or "resolution failed" in details)
