"""MigratingRequest with fake replicas: resumed requests, usage and timings, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.cluster.gateway.routing.request_migration import (
    MAX_FAILED_REPLICAS,
    MigratingRequest,
    Placement,
    Stage,
)
from quire.cluster.text.requests.observer import MoveCause
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import SequenceUpdate
from quire.proto.errors import DeadlineExpired, ProtocolError, ReplicaUnavailable
from quire.proto.kv_transfer import KvOffer
from quire.proto.replica_status import ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Finish, FinishReason, Timings


class FakeClient:
    """Fake client of a replica.

    Attributes:
        placed: (request, its receiver), in the order of their submission.
        fetched: requests whose blocks it is to read.
        fetch_handles: those with which they came; None for the first of a request.
        lent: what it lends to each of `borrowers`.
    """

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.placed: list[tuple[Request, Any]] = []
        self.stopped: list[int] = []
        self.aborted: list[int] = []
        self.problem = ""
        self.latest_status: ReplicaStatus | None = None
        self.fetched: list[Request] = []
        self.fetch_handles: list[int | None] = []
        self.lent: KvOffer | None = None
        self.borrowers: list[Request] = []

    @property
    def has_failed(self) -> bool:
        return bool(self.problem)

    def fetch(self, request: Request, handle: int | None = None) -> int:
        self.fetched.append(request)
        self.fetch_handles.append(handle)
        return 1

    async def lend(self, request: Request, timeout_s: float) -> KvOffer | None:
        self.borrowers.append(request)
        return self.lent

    def submit_with(self, request: Request, make_receiver: Callable[[range], Any]) -> Any:
        if self.problem:
            raise ReplicaUnavailable(self.problem)
        start = 100 * (1 + len(self.placed))
        receiver = make_receiver(range(start, start + request.sampling.num_sequences))
        self.placed.append((request, receiver))
        return receiver

    def send_update(self, number: int, index: int, *tokens: int, **finish: Any) -> None:
        """Send an update of an output of the n-th placed request."""
        receiver = self.placed[number][1]
        handle = receiver.handles[index]
        end = Finish(handle, **finish) if finish else None
        receiver.put(handle, SequenceUpdate(list(tokens), finish=end))

    def stop(self, handle: int) -> None:
        self.stopped.append(handle)

    def abort(self, handles: range) -> None:
        self.aborted += handles


class FakeReplicaPicker:
    """Two replicas; chooses `a` until a replica drains, then `b`.

    Attributes:
        prefill_s: `a` computes the prompts of requests that begin, in this time, and `b` everything else; None if
            they have no such parts.
        stages: of what was to be placed, in order.
        lender: of the prompts of requests that begin.
    """

    def __init__(self) -> None:
        self.a, self.b = FakeClient("a"), FakeClient("b")
        self.drained: list[str] = []
        self.prefill_s: float | None = None
        self.stages: list[Stage] = []
        self.lender: FakeClient | None = None

    def drain(self, replica_id: str) -> None:
        self.drained.append(replica_id)

    def choose(self, request: Request, stage: Stage) -> Any:
        self.stages.append(stage)
        if self.prefill_s is not None:
            return Placement(self.a, self.prefill_s) if stage is Stage.BEGINS else Placement(self.b)  # type: ignore[arg-type]
        return Placement(self.b if self.drained else self.a, lender=self.lender)  # type: ignore[arg-type]

    async def wait_for_replica(self, request: Request, timeout_s: float | None, stage: Stage) -> Any:
        return self.choose(request, stage)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def picker() -> FakeReplicaPicker:
    return FakeReplicaPicker()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def request(**params: Any) -> Request:
    sampling = SamplingParams(**({"max_tokens": 9, "seed": 7, "temperature": 0.5} | params))
    return Request("mine", np.array([1, 2, 3], np.int32), sampling, tenant="gold", salt=b"s", timeout_s=60.0)


async def settle() -> None:
    """Run the event loop until every task waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def next_updates(running: MigratingRequest, count: int) -> list[tuple[int, SequenceUpdate]]:
    return [await anext(running) for _ in range(count)]


async def test_finish_has_usage_and_timings_of_all_replicas(picker: FakeReplicaPicker, clock: Clock) -> None:
    running = MigratingRequest(request(logprobs=2), picker, clock)
    running.start()
    picker.a.send_update(0, 0, 10, 11)
    picker.a.send_update(
        0, 0, 12, reason=FinishReason.MOVED, num_cached_tokens=2, timings=Timings(1.0, 2.0, 3.0, 0.0, 0)
    )
    clock.now = 5.0
    await settle()
    ((resumed, _),) = picker.b.placed
    assert resumed.generated_token_ids.tolist() == [10, 11, 12]
    assert (resumed.sampling.seed, resumed.sampling.max_tokens, resumed.sampling.logprobs) == (7, 9, 2)
    assert (resumed.tenant, resumed.salt, resumed.timeout_s) == ("gold", b"s", 55.0)
    picker.b.send_update(
        0, 0, 13, reason=FinishReason.LENGTH, num_completion_tokens=4, num_cached_tokens=6,
        timings=Timings(0.5, 0.5, 1.0, 0.0, 6),
    )  # fmt: skip
    ((index, update),) = [item async for item in running]
    assert (index, update.token_ids) == (0, [10, 11, 12, 13])
    assert update.finish is not None
    assert update.finish.num_cached_tokens == 2
    # The five seconds between the replicas count as preemption.
    assert update.finish.timings == Timings(1.5, 2.5, 4.0, 5.0, 6, num_moves=1)


def offer() -> KvOffer:
    return KvOffer(1, b"layout", ("ipc://a",), b"digest", 1, np.array([5], np.int32), 10.0)


async def test_prompt_is_computed_by_one_replica_and_continued_by_another(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.prefill_s = 60.0
    picker.b.latest_status = ReplicaStatus("b", "m", query_id=0, kv_layout=b"layout")
    moves: list[tuple[str, MoveCause]] = []
    running = MigratingRequest(request(), picker, clock, lambda *move: moves.append(move))
    running.start()
    assert picker.a.placed[0][0].prefill_only
    clock.now = 1.0
    picker.a.send_update(
        0, 0, 10, reason=FinishReason.MOVED, num_cached_tokens=2, kv=offer(), timings=Timings(0.25, 0.75)
    )
    clock.now = 1.5
    await settle()
    ((resumed, _),) = picker.b.placed
    assert (resumed.generated_token_ids.tolist(), resumed.prefill_only) == ([10], False)
    assert resumed.kv is not None
    picker.b.send_update(0, 0, 11, reason=FinishReason.LENGTH, timings=Timings(0.5, transfer_s=0.4))
    ((_, update),) = [item async for item in running]
    assert update.token_ids == [10, 11]
    assert update.finish is not None
    assert update.finish.timings == Timings(0.75, 0.75, preempted_s=0.5, transfer_s=0.4)
    assert picker.stages == [Stage.BEGINS, Stage.BRINGS_KV]
    assert not moves
    assert not picker.drained


async def test_replica_that_will_continue_reads_the_chunks_of_the_prompt(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.prefill_s = 60.0
    picker.b.latest_status = ReplicaStatus("b", "m", query_id=0, kv_layout=b"layout")
    running = MigratingRequest(request(prompt_logprobs=1), picker, clock)
    running.start()
    receiver = picker.a.placed[0][1]
    for _ in range(2):
        receiver.put(100, SequenceUpdate(lent=offer()))
    assert picker.stages == [Stage.BEGINS, Stage.BRINGS_KV], "the reader is chosen more than once"
    first, _ = picker.b.fetched
    assert picker.b.fetch_handles == [None, 1], "the prompt is sent more than once"
    assert first.fetch_only
    assert not first.prefill_only
    assert first.kv is not None
    assert first.kv.generation == offer().generation
    assert first.prompt_token_ids.tolist() == [1, 2, 3]
    assert (first.tenant, first.salt) == ("gold", b"s")
    assert first.sampling.prompt_logprobs is None, "a prompt that is scored has no use for a cache"
    picker.b.problem = "killed"
    receiver.put(100, SequenceUpdate(lent=offer()))
    assert len(picker.stages) == 3
    picker.b.problem = ""
    picker.a.send_update(0, 0, 10, reason=FinishReason.MOVED, kv=offer())
    await settle()
    assert [len(placed.generated_token_ids) for placed, _ in picker.b.placed] == [1]
    running.abort()


@pytest.mark.parametrize("is_lent", [True, False])
async def test_prefix_of_another_replica_comes_with_the_request(
    picker: FakeReplicaPicker, clock: Clock, is_lent: bool
) -> None:
    picker.a.latest_status = ReplicaStatus("a", "m", query_id=0, kv_layout=b"layout")
    picker.lender, picker.b.lent = picker.b, offer() if is_lent else None
    running = MigratingRequest(request(), picker, clock)
    running.start()
    assert not picker.a.placed, "it is placed before the loan is known"
    await settle()
    ((placed, _),) = picker.a.placed
    assert placed.kv == picker.b.lent
    (asked,) = picker.b.borrowers
    assert asked.prompt_token_ids.tolist() == placed.prompt_token_ids.tolist()
    running.abort()


async def test_request_that_is_aborted_while_it_borrows_is_not_placed(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.lender = picker.b
    running = MigratingRequest(request(), picker, clock)
    running.start()
    running.abort()
    await settle()
    assert not picker.a.placed


async def test_chunks_are_not_read_by_a_replica_with_another_layout(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.prefill_s = 60.0
    running = MigratingRequest(request(), picker, clock)
    running.start()
    picker.a.placed[0][1].put(100, SequenceUpdate(lent=offer()))
    picker.b.latest_status = ReplicaStatus("b", "m", query_id=0, kv_layout=b"other")
    picker.a.placed[0][1].put(100, SequenceUpdate(lent=offer()))
    assert picker.b.fetched == []
    running.abort()


async def test_replica_that_drains_before_the_prompt_is_computed_is_replaced(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.prefill_s = 60.0
    running = MigratingRequest(request(), picker, clock)
    running.start()
    picker.a.send_update(0, 0, reason=FinishReason.MOVED)
    await settle()
    assert picker.drained == ["a"]
    assert picker.stages == [Stage.BEGINS, Stage.RESUMES]
    assert len(picker.b.placed[0][0].generated_token_ids) == 0
    running.abort()


async def test_prompt_of_a_failed_or_late_replica_is_computed_where_it_continues(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.prefill_s = 0.0
    late = MigratingRequest(request(), picker, clock)
    late.start()
    await asyncio.sleep(0.05)
    await settle()
    assert picker.a.aborted == [100]
    assert [placed.prefill_only for placed, _ in picker.b.placed] == [False]
    picker.prefill_s = 60.0
    failed = MigratingRequest(request(), picker, clock)
    failed.start()
    picker.a.placed[1][1].fail(ReplicaUnavailable("killed"))
    await settle()
    assert [placed.prefill_only for placed, _ in picker.b.placed] == [False, False]
    late.abort()
    failed.abort()


async def test_replica_that_keeps_a_sequence_after_the_prompt_is_not_late(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    picker.prefill_s = 0.05
    running = MigratingRequest(request(), picker, clock)
    running.start()
    picker.a.send_update(0, 0, 10)
    await asyncio.sleep(0.1)
    picker.a.send_update(0, 0, 11, reason=FinishReason.LENGTH)
    assert [update.token_ids async for _, update in running] == [[10, 11]]
    assert not picker.b.placed


async def test_each_sequence_that_a_replica_loses_is_reported_with_its_cause(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    moves: list[tuple[str, MoveCause]] = []
    running = MigratingRequest(request(n=2), picker, clock, lambda *move: moves.append(move))
    running.start()
    picker.a.send_update(0, 1, 10, reason=FinishReason.MOVED)
    await settle()
    assert moves == [("a", MoveCause.DRAIN)]
    for _, receiver in picker.b.placed:
        receiver.fail(ReplicaUnavailable("it died"))
    await settle()
    assert moves == [("a", MoveCause.DRAIN), ("b", MoveCause.FAILURE)]


async def test_tokens_that_came_with_the_failure_reach_the_reader(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    running = MigratingRequest(request(), picker, clock)
    running.start()
    clock.now = 2.0
    picker.drained.append("a")
    picker.a.send_update(
        0, 0, 10, reason=FinishReason.ERROR, grpc_status="UNAVAILABLE", error="rank 0 failed"
    )
    assert await next_updates(running, 1) == [(0, SequenceUpdate([10]))]
    await settle()
    assert picker.b.placed[0][0].generated_token_ids.tolist() == [10]
    picker.b.send_update(0, 0, 11, reason=FinishReason.STOP)
    ((_, update),) = await next_updates(running, 1)
    assert update.token_ids == [11]
    assert update.finish is not None
    assert update.finish.timings == Timings(decode_s=2.0, num_moves=1)


async def test_outputs_resume_with_their_own_seeds(picker: FakeReplicaPicker, clock: Clock) -> None:
    running = MigratingRequest(request(n=3), picker, clock)
    running.start()
    picker.a.send_update(0, 1, 10, reason=FinishReason.STOP)
    for index in (0, 2):
        picker.a.send_update(0, index, 20 + index, reason=FinishReason.MOVED)
    await settle()
    resumed = [(each.sampling, each.generated_token_ids.tolist()) for each, _ in picker.b.placed]
    assert [(sampling.seed, sampling.n, tokens) for sampling, tokens in resumed] == [
        (7, 1, [20]),
        (9, 1, [22]),
    ]
    running.stop(2)
    assert picker.b.stopped == [200]


async def test_request_without_tokens_moves_as_a_whole(picker: FakeReplicaPicker, clock: Clock) -> None:
    running = MigratingRequest(request(n=3), picker, clock)
    running.start()
    for index in range(3):
        picker.a.send_update(0, index, reason=FinishReason.MOVED)
    await settle()
    ((whole, _),) = picker.b.placed
    assert (whole.sampling.n, whole.sampling.seed, len(whole.generated_token_ids)) == (
        3,
        7,
        0,
    )
    running.abort()
    assert picker.b.aborted == [100, 101, 102]


async def test_error_of_the_request_is_not_retried(picker: FakeReplicaPicker, clock: Clock) -> None:
    running = MigratingRequest(request(), picker, clock)
    running.start()
    picker.a.send_update(0, 0, reason=FinishReason.ERROR, grpc_status="DEADLINE_EXCEEDED", error="too late")
    ((_, update),) = await next_updates(running, 1)
    assert update.finish is not None
    assert update.finish.grpc_status == "DEADLINE_EXCEEDED"
    assert picker.b.placed == []


async def test_deadline_counts_from_the_first_submission(picker: FakeReplicaPicker, clock: Clock) -> None:
    running = MigratingRequest(request(), picker, clock)
    running.start()
    clock.now = 60.0
    picker.a.send_update(0, 0, 10, reason=FinishReason.MOVED)
    await settle()
    with pytest.raises(DeadlineExpired):
        await next_updates(running, 2)


async def test_replica_failure_under_several_outputs_counts_once(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    running = MigratingRequest(request(n=3), picker, clock)
    running.start()
    for index in range(3):
        picker.a.send_update(0, index, 10 + index, reason=FinishReason.MOVED)
    await settle()
    attempts = [receiver for _, receiver in picker.b.placed]
    assert len(attempts) == MAX_FAILED_REPLICAS
    picker.drained.clear()  # the first replica takes requests again
    for attempt in attempts:
        attempt.fail(ReplicaUnavailable("rank 0 was killed"))
    await settle()
    assert [each.generated_token_ids.tolist() for each, _ in picker.a.placed[1:]] == [[10], [11], [12]]


async def test_request_fails_after_repeated_failures_of_one_replica(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    """The replica may have restarted in between, with the same id."""
    running = MigratingRequest(request(), picker, clock)
    running.start()
    for number in range(MAX_FAILED_REPLICAS):
        await settle()
        picker.a.placed[number][1].fail(ReplicaUnavailable("it was silent"))
    with pytest.raises(
        ReplicaUnavailable, match="3 replicas failed while running this request; the last: it was silent"
    ):
        await next_updates(running, 1)


async def test_unexpected_error_while_placing_ends_the_request(
    picker: FakeReplicaPicker, clock: Clock
) -> None:
    async def raise_unexpected(request: Request, timeout_s: float | None, stage: Stage) -> None:
        raise KeyError("unexpected")

    picker.wait_for_replica = raise_unexpected  # type: ignore[method-assign]
    running = MigratingRequest(request(), picker, clock)
    running.start()
    picker.a.send_update(0, 0, 10, reason=FinishReason.MOVED)
    with pytest.raises(ProtocolError, match="its log has the traceback"):
        await next_updates(running, 2)
