"""RequestObserver: receives the calls of a gateway, for metrics, traces and logs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from .outputs import StreamEvent
from .request import Request


class MoveCause(StrEnum):
    """Reason why a replica lost a sequence before its end."""

    DRAIN = "drain"
    FAILURE = "failure"


class ObservedCall(Protocol):
    """A call that has arrived and is not checked yet.

    Attributes:
        model, request_id: may be empty.
        trace_headers: the caller's ``traceparent`` and ``tracestate``, by lower-case name.
    """

    @property
    def model(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def trace_headers(self) -> Mapping[str, str]: ...


class RequestWatch(Protocol):
    """Follows one request, also if several calls read it.

    The methods are called in the gateway's event loop and must neither wait nor raise.
    """

    def on_accepted(self, model: str, request: Request) -> None:
        """The request was checked and goes to a replica. Not called for a call that is refused."""
        ...

    def on_event(self, event: StreamEvent) -> None:
        """An event is ready for the caller. Called once for every delta: it must cost little."""
        ...

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        """A replica lost a sequence of the request before its end; another one continues it if it can."""
        ...

    def on_end(self, error: BaseException | None) -> None:
        """The request has ended; called once, last.

        Args:
            error: ended or refused the call; a CancelledError if its callers left. None if the caller read on to the
                last completion, or stopped reading.
        """
        ...


class RequestObserver(Protocol):
    """Makes the watch of each call."""

    def watch(self, call: ObservedCall) -> RequestWatch:
        """Watch a call that repeats no other, or that is refused."""
        ...


class Observers:
    """RequestObserver that passes everything on to several others.

    Args:
        observers: each receives every call, in this order.
    """

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers

    def watch(self, call: ObservedCall) -> RequestWatch:
        watches = [observer.watch(call) for observer in self._observers]
        return watches[0] if len(watches) == 1 else _Watches(watches)


class _Watches:
    """The watches of one call."""

    def __init__(self, watches: list[RequestWatch]) -> None:
        self._watches = watches

    def on_accepted(self, model: str, request: Request) -> None:
        for watch in self._watches:
            watch.on_accepted(model, request)

    def on_event(self, event: StreamEvent) -> None:
        for watch in self._watches:
            watch.on_event(event)

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        for watch in self._watches:
            watch.on_moved(replica_id, cause)

    def on_end(self, error: BaseException | None) -> None:
        for watch in self._watches:
            watch.on_end(error)
