"""Call and ResumableCall: what is sent to which server, when it is sent again, and how its responses are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import grpc

from ...proto import inference_pb2
from ...proto.errors import QuireError, RequestNotFound, ServerUnreachable, ShuttingDown
from ..os_utils.backoff import Backoff
from ..text.requests.outputs import CompletionDelta, CompletionFinished, PromptLogprobsDelta
from ..text.requests.resume_position import ResumePosition
from .wire.grpc_status import from_grpc_error
from .wire.request_messages import resume_position_to_message

# Failed connections in a row, without a new event. With their delays they take 7 s, less than a server's window.
MAX_FAILURES = 8
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0

# Of targets that gRPC itself resolves to several addresses.
_SCHEMES = ("ipv4:", "ipv6:", "dns:", "unix:", "unix-abstract:", "vsock:", "xds:")

T = TypeVar("T")

# Requests up to this size are sent as one message, of which servers accept 4 MiB; larger ones in such pieces.
_MAX_WHOLE_BYTES = 3 << 20
_PIECE_BYTES = 1 << 20


def by_size(whole: Any, in_pieces: Any) -> Any:
    """Return a method that sends a request as one message, or in pieces if it is too large for one."""

    def send(request: inference_pb2.GenerateRequest, **options: Any) -> Any:
        if request.ByteSize() <= _MAX_WHOLE_BYTES:
            return whole(request, **options)
        return in_pieces(_pieces(request.SerializeToString()), **options)

    return send


def _pieces(raw: bytes) -> Iterator[inference_pb2.RequestPiece]:
    for start in range(0, len(raw), _PIECE_BYTES):
        num_bytes = len(raw) if start == 0 else 0
        yield inference_pb2.RequestPiece(data=raw[start : start + _PIECE_BYTES], num_bytes=num_bytes)


def split_target(target: str) -> list[str]:
    """Return the targets of a list that is separated by commas; a gRPC target with a scheme is one."""
    if target.startswith(_SCHEMES):
        return [target]
    return [each.strip() for each in target.split(",") if each.strip()] or [target]


class Servers:
    """Selection of one of several servers, which stays until the server cannot be reached. Threads may share it.

    Attributes:
        targets: one per server.
        selected: index of the server for the next call.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = tuple(targets)
        self.selected = 0

    def leave(self, index: int) -> None:
        """Select the server after `index`, unless another call has left that server already."""
        if self.selected == index:
            self.selected = (index + 1) % len(self.targets)


class Call(Generic[T]):
    """One remote procedure call. Decides if and when to send it again; waits for nothing itself.

    Args:
        servers: the next one is tried when the selected one cannot be reached.
        methods: gRPC method of each server.
        options: gRPC's ``timeout`` in seconds, and ``metadata``.
        read: converts the response, or one message of the stream.
    """

    def __init__(
        self,
        servers: Servers,
        methods: Sequence[Any],
        request: Any,
        options: Mapping[str, Any],
        read: Callable[[Any], T],
    ) -> None:
        self.request = request
        self.options = options
        self._servers = servers
        self._methods = methods
        self._read = read
        self._server = servers.selected  # index of the server that got the call
        self._num_failures = 0

    @property
    def abort(self) -> Call[bool] | None:
        """Call that ends the request when its caller loses interest; None if it ends with its connection."""
        return None

    def start(self) -> Any:
        """Send the request; return what the channel's kind returns: a response, an awaitable or an iterator."""
        return self._send(self.options)

    def read(self, message: Any) -> T:
        """Convert a response, or the next message of a stream."""
        return self._read(message)

    def delay_after(self, error: grpc.RpcError) -> float:
        """Return the seconds after which to start the call again.

        Raises:
            QuireError: the call has failed.
        """
        failure = self._failure(error)
        self._num_failures += 1
        if (
            self._num_failures >= len(self._servers.targets)
            or not isinstance(failure, ServerUnreachable)
            or not was_never_connected(error)
        ):
            raise failure from error
        self._servers.leave(self._server)
        return 0.0

    def _send(self, options: Mapping[str, Any]) -> Any:
        self._server = self._servers.selected
        return self._methods[self._server](self.request, **options)

    def _failure(self, error: grpc.RpcError) -> QuireError:
        return from_grpc_error(error, self._servers.targets[self._server])


class ResumableCall(Call[T]):
    """A generation across its connections.

    A server runs a request once however often a call with its request_id is sent, so sending it again is safe.
    Another server continues it after what was received. Only a request that is marked as resumable is sent again.

    Args:
        abort: ends the request, which a server keeps running without a connection.
        clock: monotonic time in seconds.
    """

    request: inference_pb2.GenerateRequest

    def __init__(
        self,
        servers: Servers,
        methods: Sequence[Any],
        request: inference_pb2.GenerateRequest,
        options: Mapping[str, Any],
        read: Callable[[Any], T],
        *,
        abort: Call[bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(servers, methods, request, options, read)
        self._abort = abort
        self._clock = clock
        timeout_s = options["timeout"]
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._is_resumable = request.resumable
        self._last: int | None = None  # number of the last event received
        self._position = ResumePosition()
        self._broken_by: QuireError | None = None
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)

    @property
    def abort(self) -> Call[bool] | None:
        return self._abort if self._is_resumable else None

    def start(self) -> Any:
        return self._send({**self.options, "timeout": self._time_left_s()})

    def read(self, message: Any) -> T:
        """Convert a response, or the next event of a stream.

        Raises:
            ServerUnreachable: the server does not continue where the last connection ended.
        """
        if isinstance(message, inference_pb2.GenerateEvent):
            self._take_number(message.sequence_number)
        event = self._read(message)
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
        failure = self._failure(error)
        if isinstance(failure, RequestNotFound) and self._broken_by is not None:
            raise ServerUnreachable(f"{self._broken_by}; it cannot be resumed: {failure}") from error
        if not self._may_send_again(failure, error):
            raise failure from error
        self._broken_by = failure
        self._servers.leave(self._server)
        self.request.received.CopyFrom(resume_position_to_message(self._position))
        delay_s, left_s = self._backoff.fail(self._clock()), self._time_left_s()
        if self._backoff.num_failures > MAX_FAILURES or (left_s is not None and left_s <= delay_s):
            raise failure from error
        return delay_s

    def _may_send_again(self, failure: QuireError, error: grpc.RpcError) -> bool:
        has_others = len(self._servers.targets) > 1
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
            self.request.after_sequence_number = number
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
