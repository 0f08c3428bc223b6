"""MigratingRequest: a request that outlives its replica.

What a replica gives back (it drains) or dies with goes on at another, from the tokens that are there already. Each
draw is a function of seed and position, so the answer is token for token what it would have been.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Protocol

from ...proto.errors import DeadlineExpired, ProtocolError, QuireError, ReplicaUnavailable, from_status
from ...proto.stream import Finish, FinishReason, Timings
from ..host.background import run_in_background
from ..replica.client import ReplicaClient
from ..requests.request import Request
from ..requests.request_stream import UpdateQueue
from ..requests.sequence_update import SequenceUpdate

# Replicas that may fail under one request before it is taken for the cause.
MAX_FAILED_REPLICAS = 3


class ReplicaPicker(Protocol):
    """Where requests can run.

    Attributes:
        is_fixed: a request whose replica fails fails with it.
    """

    is_fixed: bool

    def drain(self, replica_id: str) -> None:
        """The replica gives requests back: it is not to be chosen any more."""
        ...

    def choose(self, request: Request) -> ReplicaClient | None:
        """The replica that should take it now; None: there is none."""
        ...

    async def wait_for_replica(self, request: Request, timeout_s: float | None) -> ReplicaClient:
        """As `choose`, once there is one. Raises QuireError where none will come, or none came in time."""
        ...


@dataclass(slots=True)
class _Answer:
    """One answer, over all replicas that it has been at.

    Attributes:
        part: what runs it now; None while it waits for a replica.
        since: when it was handed to the present replica, or lost the last one.
        timings: of the replicas that it has left, and of the waits between them.
        num_cached_tokens: as the first replica counted them.
    """

    since: float
    token_ids: list[int] = field(default_factory=list)
    part: _Attempt | None = None
    timings: Timings = field(default_factory=Timings)
    num_cached_tokens: int | None = None
    num_moves: int = 0
    is_stopped: bool = False

    def leave(self, now: float, spent: Timings) -> None:
        self.timings = _add(self.timings, spent)
        self.part, self.since = None, now
        self.num_moves += 1


class _Attempt:
    """Answers of a request that were handed to one replica together: its receiver there."""

    def __init__(
        self, owner: MigratingRequest, client: ReplicaClient, indices: tuple[int, ...], handles: range
    ) -> None:
        self._owner = owner
        self._index_of = dict(zip(handles, indices, strict=True))
        self._handle_of = dict(zip(indices, handles, strict=True))
        self.client = client
        self.handles = handles

    def put(self, handle: int, news: SequenceUpdate) -> None:
        """See `Receiver`."""
        self._owner.take(self, self._index_of[handle], news)

    def fail(self, error: QuireError) -> None:
        """See `Receiver`."""
        self._owner.lose(self, error)

    def stop(self, index: int) -> None:
        self.client.stop(self._handle_of[index])

    def abort(self) -> None:
        self.client.forget(self.handles)


class MigratingRequest(UpdateQueue):
    """A request under way; see `Running`.

    Args:
        places: where it may run.
        clock: seconds that only grow.
    """

    def __init__(
        self, request: Request, places: ReplicaPicker, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(request.sampling.num_sequences)
        self._request = request
        self._places = places
        self._clock = clock
        now = clock()
        self._deadline = None if request.timeout_s is None else now + request.timeout_s
        self._answers = [_Answer(now) for _ in self.open]
        self._problem: QuireError | None = None  # why it lost its last replica
        self._num_failures = 0
        # That have failed since something was placed there: each part that was there tells of the same failure.
        self._failed_replicas: set[str] = set()
        self._placing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Hands it to a replica, at once where there is one."""
        client = self._places.choose(self._request)
        if client is None or not self._place(client):
            self._place_soon()

    def stop(self, index: int) -> None:
        """See `Running`."""
        answer = self._answers[index]
        if index not in self.open or answer.is_stopped:
            return
        answer.is_stopped = True
        if answer.part is not None:
            answer.part.stop(index)
        else:
            self._finish_stopped(index)

    def abort(self) -> None:
        """See `Running`."""
        if self._placing is not None:
            self._placing.cancel()
        for part in self._parts():
            part.abort()
        self.open.clear()

    def end(self, error: QuireError) -> None:
        """See `Running`."""
        self.abort()
        self.fail(error)

    def take(self, part: _Attempt, index: int, news: SequenceUpdate) -> None:
        """For its parts only: what came of an answer."""
        answer, finish = self._answers[index], news.finish
        answer.token_ids += news.token_ids
        is_moved = finish is not None and finish.reason is FinishReason.MOVED
        is_lost = finish is not None and finish.grpc_status == ReplicaUnavailable.grpc_status
        if finish is None or is_moved or is_lost:
            # Whatever came before the end goes on to the reader: the next replica begins after it.
            self.add(index, replace(news, finish=None))
        else:
            answer.part = None
            self.add(index, replace(news, finish=self._in_all(answer, finish)))
        if finish is not None and is_moved:
            self._let_go(part, index, finish)
        elif finish is not None and is_lost:
            self.lose(part, from_status(finish.grpc_status, finish.error))

    def lose(self, part: _Attempt, error: QuireError) -> None:
        """For its parts only: their replica has failed."""
        part.abort()
        now = self._clock()
        for index in sorted(self.open):
            answer = self._answers[index]
            if answer.part is part:
                # The replica took its account with it. What it did before the first token was mostly waiting.
                spent_s = now - answer.since
                answer.leave(
                    now, Timings(decode_s=spent_s) if answer.token_ids else Timings(queued_s=spent_s)
                )
        self._num_failures += part.client.replica_id not in self._failed_replicas
        self._failed_replicas.add(part.client.replica_id)
        self._problem = error
        if self._places.is_fixed:
            self.end(error)
        elif self._num_failures >= MAX_FAILED_REPLICAS:
            reason = f"{self._num_failures} replicas failed under it; the last: {error}"
            self.end(ReplicaUnavailable(reason))
        else:
            self._settle()

    def _let_go(self, part: _Attempt, index: int, finish: Finish) -> None:
        """The replica gives the answer back."""
        answer = self._answers[index]
        if answer.num_cached_tokens is None:
            answer.num_cached_tokens = finish.num_cached_tokens
        answer.leave(self._clock(), finish.timings)
        self._places.drain(part.client.replica_id)
        self._problem = ReplicaUnavailable(f"replica {part.client.replica_id} drains")
        self._settle()

    def _settle(self) -> None:
        """Ends the answers that need no replica any more; the others get one."""
        for index in self._homeless():
            if self._answers[index].is_stopped:
                self._finish_stopped(index)
        if self._homeless():
            self._place_soon()

    def _place_soon(self) -> None:
        if self._placing is None or self._placing.done():
            self._placing = run_in_background(self._place_all(), "placing a request", self._note_fault)

    async def _place_all(self) -> None:
        """Waits for a replica until every answer has one."""
        try:
            while self._homeless():
                client = await self._places.wait_for_replica(self._request, self._time_left_s())
                self._place(client)
        except QuireError as error:
            self.end(self._explained(error))

    def _note_fault(self, error: BaseException) -> None:
        self.end(ProtocolError("the gateway failed on this request; its log says why"))

    def _place(self, client: ReplicaClient) -> bool:
        """Hands what waits to the replica; False where that has just failed."""
        for indices, request in self._waiting_parts():
            try:
                part = client.place(request, partial(_Attempt, self, client, indices))
            except ReplicaUnavailable as error:
                self._problem = error
                return False
            self._failed_replicas.discard(client.replica_id)
            now = self._clock()
            for index in indices:
                answer = self._answers[index]
                waited_s = now - answer.since
                spent = Timings(preempted_s=waited_s) if answer.num_moves else Timings(queued_s=waited_s)
                answer.timings, answer.part, answer.since = _add(answer.timings, spent), part, now
        return True

    def _waiting_parts(self) -> list[tuple[tuple[int, ...], Request]]:
        """What to submit: the whole request where nothing of it is there yet, or else the rest of each answer."""
        homeless = self._homeless()
        request = replace(self._request, timeout_s=self._time_left_s())
        is_untouched = len(homeless) == len(self._answers) and not any(a.token_ids for a in self._answers)
        if is_untouched or self._request.sampling.beam_width is not None:
            return [(homeless, request)] if homeless else []
        return [((index,), request.resumed(index, self._answers[index].token_ids)) for index in homeless]

    def _homeless(self) -> tuple[int, ...]:
        return tuple(index for index in sorted(self.open) if self._answers[index].part is None)

    def _parts(self) -> set[_Attempt]:
        return {answer.part for answer in self._answers if answer.part is not None}

    def _time_left_s(self) -> float | None:
        """Raises DeadlineExpired where none is left."""
        if self._deadline is None:
            return None
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise DeadlineExpired("the caller's deadline passed while the request waited for a replica")
        return left_s

    def _explained(self, error: QuireError) -> QuireError:
        """A replica's failure says more than that there is no other."""
        if self._problem is None or not isinstance(error, ReplicaUnavailable):
            return error
        return self._problem if self._num_failures else ReplicaUnavailable(f"{self._problem}; {error}")

    def _finish_stopped(self, index: int) -> None:
        """An answer that its reader stopped while no replica had it."""
        finish = Finish(0, FinishReason.STOP, num_completion_tokens=len(self._answers[index].token_ids))
        self.add(index, SequenceUpdate(finish=self._in_all(self._answers[index], finish)))

    def _in_all(self, answer: _Answer, finish: Finish) -> Finish:
        """The finish with the account of all replicas that the answer was at."""
        cached = finish.num_cached_tokens if answer.num_cached_tokens is None else answer.num_cached_tokens
        timings = replace(_add(answer.timings, finish.timings), num_moves=answer.num_moves)
        # A later replica may have found tokens of the answer itself in its cache.
        cached = min(cached, len(self._request.prompt_token_ids))
        return replace(finish, num_cached_tokens=cached, timings=timings)


def _add(left: Timings, right: Timings) -> Timings:
    return Timings(*(a + b for a, b in zip(astuple(left), astuple(right), strict=True)))
