"""MigratingRequest: a request that survives the loss of its replica.

Sequences that a draining replica hands off, or that a failed replica loses, resume at another replica from the tokens
already generated. Sampling is a function of seed and position, so the output is the same token for token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from functools import partial
from operator import add, attrgetter
from typing import Protocol

from ....proto.errors import DeadlineExpired, ProtocolError, QuireError, ReplicaUnavailable
from ....proto.kv_transfer import KvOffer
from ....proto.sampling import SamplingParams
from ....proto.stream import Finish, FinishReason, RecalledOutput, Timings
from ...fleet.replica.client import ReplicaClient
from ...os_utils.event_loop import run_in_background
from ...text.requests.observer import MoveCause
from ...text.requests.request import Request
from ...text.requests.sequence_update import SequenceUpdate, UpdateQueue

_log = logging.getLogger(__name__)

# After this many replica failures under one request, without a token between, it is assumed to be their cause.
MAX_FAILED_REPLICAS = 3
# A replica answers at once, or between two steps.
BORROW_TIMEOUT_S = 0.25

# dataclasses.astuple takes five times as long.
_values_of = attrgetter(*(each.name for each in fields(Timings)))

MoveListener = Callable[[str, MoveCause], None]


class Stage(Enum):
    """Stage of the request that is to be placed.

    BEGINS: nothing of it has begun, and no replica has failed to compute its prompt for another one. RESUMES: it is
    computed where it is placed. BRINGS_KV: the KV of an output can be read from the replica that it left.
    """

    BEGINS = auto()
    RESUMES = auto()
    BRINGS_KV = auto()


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica for a request.

    Attributes:
        prefill_s: the replica is to compute the prompt alone, in this time at most; None for the whole request.
        lender: has more of the prompt cached, which the replica reads sooner than it computes it; None for no other.
    """

    client: ReplicaClient
    prefill_s: float | None = None
    lender: ReplicaClient | None = None


def ignore_move(replica_id: str, cause: MoveCause) -> None:
    """MoveListener that does nothing."""


class ReplicaPicker(Protocol):
    """Chooses replicas for requests."""

    def drain(self, replica_id: str) -> None:
        """Stop choosing the replica: it drains."""
        ...

    def choose(self, request: Request, stage: Stage) -> Placement | None:
        """Return the replica to run the request, or None if none takes requests now."""
        ...

    async def wait_for_replica(self, request: Request, timeout_s: float | None, stage: Stage) -> Placement:
        """Return the result of `choose` as soon as there is one.

        Raises:
            QuireError: no replica can become ready, or none did in time.
        """
        ...


@dataclass(slots=True)
class _Output:
    """State of one output sequence across all replicas that ran it.

    Attributes:
        attempt: runs the sequence now; None while it waits for a replica.
        since: when the present replica got the sequence, or when the last replica lost it.
        timings: times at earlier replicas, and of the waits between them.
        num_cached_tokens: the count of the first replica; None before it has counted them.
        kv: its blocks at the replica that it left; None without any, and once another replica has been told.
        has_run: a replica had it.
    """

    since: float
    token_ids: list[int] = field(default_factory=list)
    attempt: _Attempt | None = None
    timings: Timings = field(default_factory=Timings)
    num_cached_tokens: int | None = None
    num_moves: int = 0
    is_stopped: bool = False
    kv: KvOffer | None = None
    has_run: bool = False

    def place(self, attempt: _Attempt, now: float) -> None:
        """Account for the wait: queueing before the first replica, preemption after it."""
        waited_s = now - self.since
        waited = Timings(preempted_s=waited_s) if self.has_run else Timings(queued_s=waited_s)
        self.timings = _add(self.timings, waited)
        self.attempt, self.since, self.has_run = attempt, now, True

    def unplace(self, now: float, spent: Timings) -> None:
        """Account for the time at the replica that the sequence leaves."""
        self.timings = _add(self.timings, spent)
        self.attempt, self.since, self.has_run = None, now, True

    def move(self, now: float, spent: Timings) -> None:
        """Count that the sequence leaves its replica before its time."""
        self.unplace(now, spent)
        self.num_moves += 1

    def merge(self, finish: Finish, num_prompt_tokens: int) -> Finish:
        """Return the finish with timings and cached tokens of all replicas."""
        cached = finish.num_cached_tokens if self.num_cached_tokens is None else self.num_cached_tokens
        timings = replace(_add(self.timings, finish.timings), num_moves=self.num_moves)
        # A later replica may have found tokens of the output itself in its cache.
        return replace(finish, num_cached_tokens=min(cached, num_prompt_tokens), timings=timings)


class _Attempt:
    """Receiver of the sequences that were submitted to one replica together."""

    def __init__(
        self,
        owner: MigratingRequest,
        placement: Placement,
        indices: tuple[int, ...],
        handles: range,
    ) -> None:
        self._owner = owner
        self.is_for_prefill = placement.prefill_s is not None
        self._index_of = dict(zip(handles, indices, strict=True))
        self._handle_of = dict(zip(indices, handles, strict=True))
        self.client = placement.client
        self.handles = handles

    def put(self, handle: int, update: SequenceUpdate) -> None:
        self._owner._on_update(self, self._index_of[handle], update)

    def fail(self, error: QuireError) -> None:
        self._owner._on_replica_lost(self, error)

    def stop(self, index: int) -> None:
        self.client.stop(self._handle_of[index])

    def abort(self) -> None:
        self.client.abort(self.handles)


class MigratingRequest(UpdateQueue):
    """A running request; see `RequestStream`.

    Args:
        picker: chooses the replicas.
        clock: monotonic time in seconds.
        on_move: called with a replica's id for each sequence that the replica loses before its end.
        recalled: index |-> what an output has from another gateway's run of the request.
    """

    def __init__(
        self,
        request: Request,
        picker: ReplicaPicker,
        clock: Callable[[], float] = time.monotonic,
        on_move: MoveListener = ignore_move,
        *,
        recalled: Mapping[int, RecalledOutput] | None = None,
    ) -> None:
        super().__init__(request.sampling.num_sequences)
        self._request = request
        self._picker = picker
        self._clock = clock
        self._on_move = on_move
        now = clock()
        self._deadline = None if request.timeout_s is None else now + request.timeout_s
        self._outputs = [_Output(now) for _ in self.open]
        self._last_failure: QuireError | None = None  # why the last replica was lost
        self._num_failures = 0
        # Replicas that failed since something was placed there: every attempt at a replica reports the same failure.
        self._failed_replicas: set[str] = set()
        self._placing: asyncio.Task[None] | None = None
        self._has_split = False
        self._reader: ReplicaClient | None = None  # reads the prompt's blocks while the rest is computed
        self._fetch_handle: int | None = None  # once the reader has the prompt
        self._lateness: asyncio.TimerHandle | None = None  # of the replica that computes the prompt
        for index, output in (recalled or {}).items():
            self._take_recalled(index, output)

    def start(self) -> None:
        """Submit the request to a replica, immediately if one is ready."""
        if not self._unplaced():
            return
        placement = self._picker.choose(self._request, self._stage())
        if placement is not None and placement.lender is not None:
            self._start_placing(placement)
        elif placement is None or not self._place(placement):
            self._start_placing()

    def stop(self, index: int) -> None:
        output = self._outputs[index]
        if index not in self.open or output.is_stopped:
            return
        output.is_stopped = True
        if output.attempt is not None:
            output.attempt.stop(index)
        else:
            self._finish_stopped(index)

    def abort(self) -> None:
        if self._placing is not None:
            self._placing.cancel()
        self._stop_timer()
        for attempt in dict.fromkeys(output.attempt for output in self._outputs):  # each once, in order
            if attempt is not None:
                attempt.abort()
        self.open.clear()

    def end(self, error: QuireError) -> None:
        self.abort()
        self.fail(error)

    # An output lives on while replicas come and go. It is in one of three states: at a replica (`attempt` is set),
    # unplaced (it waits for one), or ended (its index has left `open`). The reader sees none of this: it gets updates
    # in order, and one Finish. Two rules keep that so. First, every token that has arrived goes to the reader before
    # the output leaves its replica, because the next replica is sent exactly these tokens and continues after them; a
    # sample depends on the seed and the position alone, so nothing is lost, repeated or changed. Second, all outputs
    # of a replica's attempt leave together when it fails: `attempt.abort` drops the handles, so that a late update of
    # the old replica cannot reach an output that runs elsewhere. A drain, in contrast, hands off each output by a
    # Finish of its own (MOVED). Failures in a row are counted per replica, not per output, and forgotten with the
    # next token: a request that makes replicas fail ends after MAX_FAILED_REPLICAS, and takes down no more of them.

    def _on_update(self, attempt: _Attempt, index: int, update: SequenceUpdate) -> None:
        output, finish = self._outputs[index], update.finish
        if update.lent is not None:
            self._on_lent(attempt, update.lent)
            if not update.token_ids and finish is None:
                return
        output.token_ids += update.token_ids
        if update.token_ids:
            self._num_failures = 0
            self._stop_timer()
        is_moved = finish is not None and finish.reason is FinishReason.MOVED
        is_lost = finish is not None and finish.grpc_status == ReplicaUnavailable.grpc_status
        if finish is None:
            self.add(index, update)
        elif is_moved or is_lost:
            # Tokens that came with the end go to the reader: the next replica continues after them.
            self.add(index, replace(update, finish=None))
        else:
            output.attempt = None
            self.add(index, replace(update, finish=self._merge(output, finish)))
        if finish is not None and is_moved:
            self._on_moved(attempt, index, finish)
        elif finish is not None and is_lost:
            self._on_replica_lost(attempt, finish.to_error())

    def _take_recalled(self, index: int, recalled: RecalledOutput) -> None:
        output, finish, token_ids = self._outputs[index], recalled.finish, recalled.token_ids.tolist()
        output.token_ids += token_ids
        if finish.reason is FinishReason.MOVED:
            output.num_cached_tokens = finish.num_cached_tokens
            output.move(self._clock(), finish.timings)
            self.add(index, SequenceUpdate(token_ids))
        else:
            self.add(index, SequenceUpdate(token_ids, finish=self._merge(output, finish)))

    def _on_moved(self, attempt: _Attempt, index: int, finish: Finish) -> None:
        """A replica handed the sequence off: it drains, or it has computed the prompt, which was all of its part."""
        output = self._outputs[index]
        if output.num_cached_tokens is None:
            output.num_cached_tokens = finish.num_cached_tokens
        output.kv = finish.kv
        if attempt.is_for_prefill and output.token_ids:
            output.unplace(self._clock(), finish.timings)
            self._resume()
            return
        output.move(self._clock(), finish.timings)
        self._on_move(attempt.client.replica_id, MoveCause.DRAIN)
        self._picker.drain(attempt.client.replica_id)
        self._last_failure = ReplicaUnavailable(f"replica {attempt.client.replica_id} drains")
        self._resume()

    def _on_replica_lost(self, attempt: _Attempt, error: QuireError) -> None:
        self._take_back(attempt)
        self._num_failures += attempt.client.replica_id not in self._failed_replicas
        self._failed_replicas.add(attempt.client.replica_id)
        self._last_failure = error
        if self._num_failures >= MAX_FAILED_REPLICAS:
            reason = f"{self._num_failures} replicas failed while running this request; the last: {error}"
            self.end(ReplicaUnavailable(reason))
        else:
            self._resume()

    def _on_lent(self, attempt: _Attempt, offer: KvOffer) -> None:
        """Have the replica that will continue the request read the blocks of its prompt that are there.

        The router then prefers this replica, since it will have the prefix.
        """
        if self._reader is None or self._reader.has_failed:
            placement = self._picker.choose(self._request, Stage.BRINGS_KV)
            self._reader, self._fetch_handle = None if placement is None else placement.client, None
        if self._reader is None or self._reader is attempt.client or not _takes(self._reader, offer):
            return
        fetch = replace(
            self._request, sampling=SamplingParams(max_tokens=1), constraint=None, kv=offer, fetch_only=True
        )
        self._fetch_handle = self._reader.fetch(fetch, self._fetch_handle)

    def _on_prefill_late(self, attempt: _Attempt, seconds: float) -> None:
        """Let another replica compute the prompt, if the one that should has not done so in time."""
        late = [each for each in self._outputs if each.attempt is attempt]
        if late and not any(output.token_ids for output in late):
            name = attempt.client.replica_id
            self._last_failure = ReplicaUnavailable(f"{name} has not computed the prompt in {seconds:.1f} s")
            _log.warning("request %s: %s; another replica does", self._request.request_id, self._last_failure)
            self._take_back(attempt)
            self._resume()

    def _take_back(self, attempt: _Attempt) -> None:
        """Take the outputs of an attempt from its replica, which has lost them or is late."""
        attempt.abort()
        now = self._clock()
        for index in sorted(self.open):
            output = self._outputs[index]
            if output.attempt is attempt:
                # The replica's own timings are lost with it. Most of the time before the first token was queueing.
                spent_s = now - output.since
                spent = Timings(decode_s=spent_s) if output.token_ids else Timings(queued_s=spent_s)
                output.move(now, spent)
                self._on_move(attempt.client.replica_id, MoveCause.FAILURE)

    def _resume(self) -> None:
        """Finish unplaced outputs that were stopped; place the other ones."""
        for index in self._unplaced():
            if self._outputs[index].is_stopped:
                self._finish_stopped(index)
        if self._unplaced():
            self._start_placing()

    def _start_placing(self, first: Placement | None = None) -> None:
        if self._placing is None or self._placing.done():
            self._placing = run_in_background(
                self._place_all(first), "placing a request", self._on_placing_failed
            )

    async def _place_all(self, placement: Placement | None) -> None:
        """Wait for replicas until every output is placed.

        Args:
            placement: the first; None if there is none yet.
        """
        try:
            while self._unplaced():
                if placement is None:
                    left_s = self._time_left_s()
                    placement = await self._picker.wait_for_replica(self._request, left_s, self._stage())
                self._place(placement, await self._borrow(placement))
                placement = None
        except QuireError as error:
            self.end(self._with_last_failure(error))

    async def _borrow(self, placement: Placement) -> KvOffer | None:
        """Return what the placement's lender has of the prompt; None if there is none, or it does not say in time."""
        if placement.lender is None:
            return None
        prompt = replace(self._request, sampling=SamplingParams(max_tokens=1), constraint=None)
        offer = await placement.lender.lend(prompt, BORROW_TIMEOUT_S)
        return offer if offer is not None and _takes(placement.client, offer) else None

    def _on_placing_failed(self, error: BaseException) -> None:
        self.end(ProtocolError("the gateway failed on this request; its log has the traceback"))

    def _stage(self) -> Stage:
        unplaced = [self._outputs[index] for index in self._unplaced()]
        if any(output.kv is not None for output in unplaced):
            return Stage.BRINGS_KV
        is_whole = len(unplaced) == len(self._outputs) and not any(output.token_ids for output in unplaced)
        return Stage.BEGINS if is_whole and not self._has_split else Stage.RESUMES

    def _place(self, placement: Placement, borrowed: KvOffer | None = None) -> bool:
        """Submit all unplaced outputs to the replica. Returns False if the replica has just failed.

        Args:
            borrowed: blocks of the prompt that the replica may read.
        """
        client, seconds = placement.client, placement.prefill_s
        for indices, request in self._unplaced_requests(client):
            if borrowed is not None and not request.generated_token_ids.size:
                request = replace(request, kv=borrowed)
            if seconds is not None:
                request = replace(request, prefill_only=True)
            try:
                attempt = client.submit_with(request, partial(_Attempt, self, placement, indices))
            except ReplicaUnavailable as error:
                self._last_failure = error
                return False
            self._failed_replicas.discard(client.replica_id)
            now = self._clock()
            for index in indices:
                self._outputs[index].place(attempt, now)
                self._outputs[index].kv = None
            if seconds is not None:
                self._has_split = True
                loop = asyncio.get_running_loop()
                self._lateness = loop.call_later(seconds, self._on_prefill_late, attempt, seconds)
        return True

    def _stop_timer(self) -> None:
        if self._lateness is not None:
            self._lateness.cancel()
            self._lateness = None

    def _unplaced_requests(self, client: ReplicaClient) -> list[tuple[tuple[int, ...], Request]]:
        """Return (output indices, request) pairs to submit: the whole request if nothing of it has begun."""
        unplaced = self._unplaced()
        request = replace(self._request, timeout_s=self._time_left_s())
        has_begun = len(unplaced) < len(self._outputs) or any(output.token_ids for output in self._outputs)
        if not has_begun or self._request.sampling.beam_width is not None:
            return [(unplaced, request)] if unplaced else []
        return [
            ((index,), replace(request.resumed(index, output.token_ids), kv=_kv_for(client, output)))
            for index, output in ((index, self._outputs[index]) for index in unplaced)
        ]

    def _unplaced(self) -> tuple[int, ...]:
        """Return the indices of open outputs that no replica runs."""
        return tuple(index for index in sorted(self.open) if self._outputs[index].attempt is None)

    def _time_left_s(self) -> float | None:
        """Return the time until the caller's deadline. Raises DeadlineExpired if it has passed."""
        if self._deadline is None:
            return None
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise DeadlineExpired("the caller's deadline passed while the request waited for a replica")
        return left_s

    def _with_last_failure(self, error: QuireError) -> QuireError:
        """Return an error that names the last replica's failure, if the error only says that no replica is left."""
        if self._last_failure is None or not isinstance(error, ReplicaUnavailable):
            return error
        return (
            self._last_failure if self._num_failures else ReplicaUnavailable(f"{self._last_failure}; {error}")
        )

    def _finish_stopped(self, index: int) -> None:
        """Finish an output whose reader stopped it while no replica ran it."""
        output = self._outputs[index]
        finish = Finish(0, FinishReason.STOP, num_completion_tokens=len(output.token_ids))
        self.add(index, SequenceUpdate(finish=self._merge(output, finish)))

    def _merge(self, output: _Output, finish: Finish) -> Finish:
        return output.merge(finish, len(self._request.prompt_token_ids))


def _kv_for(client: ReplicaClient, output: _Output) -> KvOffer | None:
    """Return an output's blocks, if the replica can take them; one of an earlier release would refuse the request."""
    return output.kv if output.kv is not None and _takes(client, output.kv) else None


def _takes(client: ReplicaClient, offer: KvOffer) -> bool:
    status = client.latest_status
    return status is not None and status.kv_layout == offer.layout


def _add(left: Timings, right: Timings) -> Timings:
    return Timings(*map(add, _values_of(left), _values_of(right)))
