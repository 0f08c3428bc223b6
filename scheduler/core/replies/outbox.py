"""Outbox: messages for gateways that are not part of a step's result."""

from __future__ import annotations

from collections.abc import Iterable

from ....proto.errors import QuireError
from ....proto.stream import Finish, FinishReason, TokenBatch

Outgoing = list[tuple[bytes, TokenBatch]]  # gateway and the message for it, in the order to send


def error_finish(handle: int, error: QuireError) -> Finish:
    """Return the Finish of a sequence that ended with an error."""
    return Finish(
        handle,
        FinishReason.ERROR,
        grpc_status=error.grpc_status,
        error=str(error),
        error_reason=error.reason,
        retry_after_s=error.retry_after_s,
    )


class Outbox:
    """The messages to send next: failures, moves and the results of beam searches."""

    def __init__(self) -> None:
        self._outgoing: Outgoing = []

    def __bool__(self) -> bool:
        return bool(self._outgoing)

    def add(self, gateway: bytes, batch: TokenBatch) -> None:
        self._outgoing.append((gateway, batch))

    def finish(self, gateway: bytes, finished: Iterable[Finish]) -> None:
        """Add the ends of sequences, without tokens."""
        self.add(gateway, TokenBatch(0, finished=tuple(finished)))

    def fail(self, gateway: bytes, handles: Iterable[int], error: QuireError) -> None:
        """Add the ends of sequences that failed with one error."""
        self.finish(gateway, (error_finish(handle, error) for handle in handles))

    def take(self) -> Outgoing:
        """Return all messages and empty the outbox."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing
