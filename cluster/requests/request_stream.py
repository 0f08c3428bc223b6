"""Running requests as their readers see them, wherever they run: news of each answer, and the verbs to end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from ...proto.errors import QuireError
from .output_processor import Answers, Piece
from .sequence_update import SequenceUpdate


class UpdateQueue:
    """Queue of a request's updates: an asynchronous iterator of (output index, SequenceUpdate) for one reader.

    Updates of an answer that the reader has not taken grow together, so a slow reader costs one item an answer and
    slows nobody. The iterator ends when all answers have.

    Args:
        num_answers: that will come.
    """

    def __init__(self, num_answers: int) -> None:
        self.open = set(range(num_answers))  # answers of which more will come
        self._pending: dict[
            int, SequenceUpdate
        ] = {}  # index |-> what was not taken, the longest waiting first
        self._error: QuireError | None = None
        self._arrival = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[tuple[int, SequenceUpdate]]:
        return self

    async def __anext__(self) -> tuple[int, SequenceUpdate]:
        """An answer's news since they were last taken.

        Raises:
            QuireError: what `fail` was called with.
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

    def add(self, index: int, news: SequenceUpdate) -> None:
        """An answer's latest news; with a finish, its last."""
        if index in self._pending:
            self._pending[index].extend(news)
        else:
            self._pending[index] = news
        if news.finish is not None:
            self.open.discard(index)
        self._arrival.set()

    def fail(self, error: QuireError) -> None:
        """Nothing will come any more, and why."""
        self.open.clear()
        self._pending.clear()
        self._error = error
        self._arrival.set()


class Running(Protocol):
    """A request under way, as its reader sees it, wherever it runs."""

    def __aiter__(self) -> AsyncIterator[tuple[int, SequenceUpdate]]: ...

    def stop(self, index: int) -> None:
        """A stop string was found: the answer ends, and its Finish comes. Safe to call again."""
        ...

    def abort(self) -> None:
        """Ends all answers and frees their blocks; does nothing to those that have ended."""
        ...

    def end(self, error: QuireError) -> None:
        """Aborts the request, and its reader gets the error."""
        ...


async def follow(running: Running, answers: Answers) -> AsyncIterator[Piece]:
    """What is to be told of a request, to its end; an answer is stopped at its stop string.

    Raises:
        QuireError: the request ended with it. Its other answers may still run: the caller aborts them.
    """
    async for index, news in running:
        for piece in answers.take(index, news):
            yield piece
        if answers.is_complete(index):
            running.stop(index)
