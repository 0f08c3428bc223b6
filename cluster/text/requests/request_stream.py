"""Updates of running requests, as their readers receive them, and the calls that end a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from ....proto.errors import QuireError
from .output_processor import OutputProcessor
from .outputs import OutputEvent
from .sequence_update import SequenceUpdate


class UpdateQueue:
    """Queue of a request's updates: an asynchronous iterator of (sequence index, SequenceUpdate) for one reader.

    Updates of one sequence that the reader has not taken are merged, so a slow reader costs at most one item per
    sequence and delays no other reader. The iterator ends when all sequences have ended.

    Args:
        num_sequences: number of sequences of the request.
        wakes_at_ends: wake the reader only when a sequence has ended, for readers of whole outputs.

    Attributes:
        open: indices of the sequences that have not ended.
    """

    def __init__(self, num_sequences: int, *, wakes_at_ends: bool = False) -> None:
        self._wakes_at_ends = wakes_at_ends
        self.open = set(range(num_sequences))
        # sequence index |-> merged updates, the longest waiting first
        self._pending: dict[int, SequenceUpdate] = {}
        self._error: QuireError | None = None
        self._arrival = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[tuple[int, SequenceUpdate]]:
        return self

    async def __anext__(self) -> tuple[int, SequenceUpdate]:
        """Return the merged updates of one sequence.

        Raises:
            QuireError: the error that `fail` was called with.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        index = next(iter(self._pending))
        return index, self._pending.pop(index)

    def add(self, index: int, update: SequenceUpdate) -> None:
        """Add an update of a sequence; an update with a finish is its last."""
        if index in self._pending:
            self._pending[index].extend(update)
        else:
            self._pending[index] = update
        if update.finish is not None:
            self.open.discard(index)
        if update.finish is not None or not self._wakes_at_ends:
            self._arrival.set()

    def fail(self, error: QuireError) -> None:
        """Drop pending updates and raise the error in the reader."""
        self.open.clear()
        self._pending.clear()
        self._error = error
        self._arrival.set()


class RequestStream(Protocol):
    """Running request: its updates, and the calls that end it."""

    def __aiter__(self) -> AsyncIterator[tuple[int, SequenceUpdate]]: ...

    def stop(self, index: int) -> None:
        """End a sequence in which a stop string was found; its Finish follows. Idempotent."""
        ...

    def abort(self) -> None:
        """End all sequences that still run and free their blocks."""
        ...

    def end(self, error: QuireError) -> None:
        """Abort the request and raise the error in its reader."""
        ...


async def output_events(stream: RequestStream, processor: OutputProcessor) -> AsyncIterator[OutputEvent]:
    """Yield the events of a request until it ends. Stops each sequence at its stop string.

    Raises:
        QuireError: the error that ended the request. Its other sequences may still run: the caller aborts them.
    """
    async for index, update in stream:
        for event in processor.process(index, update):
            yield event
        if processor.has_stop_string(index):
            stream.stop(index)
