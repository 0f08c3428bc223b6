"""SequenceUpdate: new tokens and the end of one sequence, from the scheduler's TokenBatch to the request's reader."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ....proto.codec import FloatArray
from ....proto.errors import QuireError
from ....proto.kv_transfer import KvOffer
from ....proto.step import Logprobs
from ....proto.stream import Finish, TokenBatch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position as the worker reports them.

    Attributes:
        chosen: log-probability of the token at the position, sampled or part of the prompt.
        rank: place of this token in the vocabulary by likelihood; 1 for the most likely one.
        top_token_ids: the most likely tokens, in descending order.
        top_logprobs: one per token of `top_token_ids`.
    """

    chosen: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class SequenceUpdate:
    """New results of one sequence. Updates that the reader has not taken yet are merged with `extend`.

    Attributes:
        token_ids: new tokens, oldest first.
        logprobs: one entry per token of `token_ids` if the request asked for them, otherwise empty.
        finish: set once the sequence has ended.
        prompt_logprobs: of each step if the request asked for them; `index` is the position in the prompt.
        pooled: the vector of a pooled request, with its finish.
        lent: the newest blocks of its prompt that can be read while the rest is computed.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    pooled: FloatArray | None = None
    lent: KvOffer | None = None

    def extend(self, later: SequenceUpdate) -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.prompt_logprobs += later.prompt_logprobs
        self.pooled = later.pooled


def updates_by_handle(*batches: TokenBatch) -> Iterable[tuple[int, SequenceUpdate]]:
    """Return handle |-> update over consecutive batches, each handle once.

    The last tokens of a sequence and its finish are in one update.
    """
    updates: defaultdict[int, SequenceUpdate] = defaultdict(SequenceUpdate)
    for batch in batches:
        handles = batch.handles.tolist()
        for handle, token_id in zip(handles, batch.token_ids.tolist(), strict=True):
            updates[handle].token_ids.append(token_id)
        if batch.logprobs is not None:
            for index, entry in zip(batch.logprobs.index.tolist(), _entries(batch.logprobs), strict=True):
                updates[handles[index]].logprobs.append(entry)
        if batch.prompt_logprobs is not None:
            owners, scores = batch.prompt_logprobs.owners, batch.prompt_logprobs.logprobs
            for handle in dict.fromkeys(owners.tolist()):
                updates[handle].prompt_logprobs.append(scores.rows(owners == handle))
        for handle, vector in batch.pooled or ():
            updates[handle].pooled = vector
        for each in batch.lent:
            updates[each.handle].lent = each.kv
        for finish in batch.finished:
            updates[finish.handle].finish = finish
    return updates.items()


def _entries(logprobs: Logprobs) -> Iterable[TokenLogprobs]:
    columns = logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return (TokenLogprobs(chosen, rank, tuple(ids), tuple(top)) for chosen, rank, ids, top in rows)


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
