import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from fakes import FakeWorkerGroup, oracle, small_config, submit
from narrowing import instance_of, not_none

from quire.proto import stream
from quire.proto.block_map import BlockMap
from quire.proto.digests import make_root, prefix_hashes
from quire.proto.errors import RankFailed
from quire.proto.replica_status import ReplicaStatus
from quire.proto.step import StepResult
from quire.proto.stream import (
    Abort,
    BlockMapQuery,
    CacheQuery,
    CacheReport,
    Drain,
    Finish,
    FinishReason,
    GatewayMessage,
    ReplicaMessage,
    StatusQuery,
    TokenBatch,
)
from quire.proto.transport.network import CurveKeys, connect, tcp_endpoint
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.mailbox import Mailbox
from quire.scheduler.service.zmq_mailbox import MAX_MESSAGES_AT_ONCE, ZmqMailbox


class FakeMailbox:
    """A mailbox with scripted messages, one list per `receive`, which records the messages sent."""

    def __init__(self, script: list[list[tuple[bytes, GatewayMessage]]]) -> None:
        self.script = script
        self.sent: list[tuple[bytes, ReplicaMessage]] = []
        self.gone: set[bytes] = set()

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        return self.script.pop(0) if self.script else []

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        if gateway in self.gone:
            return False
        self.sent.append((gateway, message))
        return True

    def wake(self) -> None:
        pass


def make_loop(
    mailbox: Mailbox, clock: Callable[[], float] = time.monotonic, **limits: Any
) -> tuple[StepLoop, Scheduler, FakeWorkerGroup]:
    config = small_config(**limits)
    scheduler, group = Scheduler(config), FakeWorkerGroup(config)
    return StepLoop(scheduler, group, mailbox, "replica-0", clock), scheduler, group


def run_until_idle(loop: StepLoop, mailbox: FakeMailbox) -> None:
    while mailbox.script or loop.step():
        loop.handle_messages(0.0)


def output(mailbox: FakeMailbox, handle: int) -> list[int]:
    batches = [message for _, message in mailbox.sent if isinstance(message, TokenBatch)]
    return [token for batch in batches for token in batch.token_ids[batch.handles == handle].tolist()]


def ends(mailbox: FakeMailbox) -> list[Finish]:
    batches = [message for _, message in mailbox.sent if isinstance(message, TokenBatch)]
    return [finish for batch in batches for finish in batch.finished]


def test_loop_serves_two_gateways() -> None:
    mailbox = FakeMailbox([[(b"a", submit(1, [5, 6], max_tokens=6))], [(b"b", submit(2, [7], max_tokens=4))]])
    loop, _, _ = make_loop(mailbox)
    run_until_idle(loop, mailbox)
    assert output(mailbox, 1) == oracle([5, 6], 6)
    assert output(mailbox, 2) == oracle([7], 4)
    assert {gateway for gateway, message in mailbox.sent} == {b"a", b"b"}


def test_mean_plan_wait_excludes_idle_time() -> None:
    mailbox = FakeMailbox([[(b"a", submit(1, [5, 6], max_tokens=5))], [], [], [], [], [], [], []])
    loop, scheduler, group = make_loop(mailbox, max_steps_in_flight=1)
    gather, waits = group.gather, iter([7.0, 0.5, 0.25, 0.25, 1.0, 9.0, 3.0])

    def gather_late(timeout_s: float) -> StepResult:
        return replace(gather(timeout_s), stage_times={"wait": next(waits)})

    group.gather = gather_late  # type: ignore[method-assign]
    run_until_idle(loop, mailbox)
    assert (scheduler.stats.num_plan_waits, scheduler.stats.plan_wait_s) == (4, 2.0)
    mailbox.script = [[(b"a", submit(2, [5, 7], max_tokens=2))]]
    run_until_idle(loop, mailbox)
    assert scheduler.stats.mean_plan_wait_s == (2.0 + 3.0) / 5
    assert loop.status().mean_plan_wait_s == scheduler.stats.mean_plan_wait_s


def test_status_query_returns_counts() -> None:
    mailbox = FakeMailbox(
        [[(b"a", submit(1, [5] * 9, max_tokens=30, ignore_eos=True))], [(b"a", StatusQuery(7))]]
    )
    loop, _, _ = make_loop(mailbox)
    loop.step()
    loop.handle_messages(0.0)
    loop.step()
    loop.handle_messages(0.0)
    (status,) = [message for _, message in mailbox.sent if isinstance(message, ReplicaStatus)]
    assert (status.query_id, status.replica_id, status.num_running) == (7, "replica-0", 1)
    assert status.num_used_blocks == 3
    assert status.num_blocks == 31


def test_requests_of_a_gone_gateway_are_ended() -> None:
    mailbox = FakeMailbox(
        [[(b"a", submit(1, [5, 6], max_tokens=20, ignore_eos=True)), (b"b", submit(1, [7], max_tokens=3))]]
    )
    loop, scheduler, _ = make_loop(mailbox)
    mailbox.gone.add(b"a")
    run_until_idle(loop, mailbox)
    assert output(mailbox, 1) == oracle([7], 3)
    assert not scheduler.has_work
    assert scheduler.blocks.num_held_blocks == 0


def test_returning_gateway_receives_ends_of_dropped_requests() -> None:
    mailbox = FakeMailbox([[(b"a", submit(n, [5, n], max_tokens=20, ignore_eos=True)) for n in (6, 7)]])
    loop, _, _ = make_loop(mailbox)
    mailbox.gone.add(b"a")
    run_until_idle(loop, mailbox)
    mailbox.gone.clear()
    mailbox.script = [[(b"a", StatusQuery(1))], [(b"a", StatusQuery(2))]]
    run_until_idle(loop, mailbox)
    (ends, *statuses) = [message for _, message in mailbox.sent]
    assert {(finish.handle, finish.grpc_status) for finish in instance_of(TokenBatch, ends).finished} == {
        (6, "UNAVAILABLE"), (7, "UNAVAILABLE"),
    }  # fmt: skip
    assert [instance_of(ReplicaStatus, status).query_id for status in statuses] == [1, 2]


def test_abort_ends_a_request() -> None:
    mailbox = FakeMailbox([[(b"a", submit(1, [5], max_tokens=30, ignore_eos=True))], [(b"a", Abort(1))]])
    loop, scheduler, _ = make_loop(mailbox)
    run_until_idle(loop, mailbox)
    assert len(output(mailbox, 1)) < 30
    assert scheduler.blocks.num_held_blocks == 0


def test_failed_rank_ends_the_loop_and_all_requests() -> None:
    mailbox, config = FakeMailbox([[(b"a", submit(1, [5], max_tokens=30))]]), small_config()
    group = FakeWorkerGroup(config)
    loop = StepLoop(Scheduler(config), group, mailbox, "replica-0", clock=lambda: 7.0)
    group.failure = RankFailed(1, "killed by signal 9", step_id=1)
    with pytest.raises(
        RankFailed, match=r"rank 1 failed at step 1: killed by signal 9; given up: .* 11 times in 0 s"
    ):
        loop.run()
    (finish,) = ends(mailbox)
    assert "rank 1 failed" in finish.error


def test_all_gateways_receive_the_error_if_cleanup_raises(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox = FakeMailbox([[(b"a", submit(1, [5], max_tokens=30)), (b"b", submit(1, [6], max_tokens=30))]])
    loop, scheduler, group = make_loop(mailbox)

    def fail(timeout_s: float) -> StepResult:
        raise RankFailed(1, "killed by signal 9", step_id=1)

    def fault(*arguments: object) -> None:
        raise KeyError("a fault of our own")

    monkeypatch.setattr(group, "gather", fail)
    monkeypatch.setattr(scheduler.blocks, "close", fault)
    with pytest.raises(RankFailed, match="killed by signal 9"):
        loop.run()
    ended = {gateway for gateway, batch in mailbox.sent if isinstance(batch, TokenBatch) and batch.finished}
    assert ended == {b"a", b"b"}
    assert "replica-0 could not end in order" in caplog.text


def test_draining_replica_reports_it_and_hands_off_its_requests() -> None:
    mailbox = FakeMailbox(
        [
            [(b"a", submit(1, [5] * 9, max_tokens=30, ignore_eos=True))],
            [(b"a", Drain(0.0)), (b"b", submit(2, [7], max_tokens=4)), (b"b", StatusQuery(1))],
        ]
    )
    loop, scheduler, _ = make_loop(mailbox)
    run_until_idle(loop, mailbox)
    reasons = {finish.handle: finish.reason for finish in ends(mailbox)}
    assert reasons == {1: FinishReason.MOVED, 2: FinishReason.MOVED}
    (status,) = [message for _, message in mailbox.sent if isinstance(message, ReplicaStatus)]
    assert status.draining
    assert not scheduler.has_work


def test_status_reports_load() -> None:
    now = [100.0]
    mailbox = FakeMailbox([])
    config = small_config(max_num_seqs=1, max_num_batched_tokens=8)
    scheduler = Scheduler(config)
    loop = StepLoop(scheduler, FakeWorkerGroup(config), mailbox, "replica-0", clock=lambda: now[0])
    assert (loop.status().tokens_per_s, loop.status().kv_use, loop.status().oldest_wait_s) == (0.0, 0.0, 0.0)
    for handle in range(2):
        scheduler.add(b"a", submit(handle, [5 + handle] * 12, max_tokens=4, ignore_eos=True), now[0])
    assert loop.status().queued_tokens == 24
    loop._group.broadcast(not_none(scheduler.schedule(now[0])))
    assert loop.status().queued_tokens == 16  # 4 of the one that runs, 12 of the one that waits
    now[0] += 0.5
    scheduler.apply(not_none(loop._group.gather(1.0)), now[0])
    status = loop.status()
    assert status.tokens_per_s == pytest.approx(16.0)
    assert status.oldest_wait_s == pytest.approx(0.5)
    assert status.kv_use == pytest.approx(2 / 31)
    assert status.fullest_kv_use == pytest.approx(2 / 31)
    assert status.cache_version == 2
    assert status.num_computed_tokens == 8
    assert status.busy_s == pytest.approx(0.5)


class WatchedLoop:
    """A step loop with a clock of its own, and the statuses that it sends."""

    def __init__(self) -> None:
        self.now = 100.0
        self.mailbox = FakeMailbox([])
        self._loop, self.scheduler, self._group = make_loop(self.mailbox, lambda: self.now)
        self._handles = itertools.count()

    def turn_at(self, now: float, *messages: tuple[bytes, GatewayMessage]) -> list[tuple[bytes, int]]:
        """Handle messages and compute all steps; return the statuses sent meanwhile, by gateway and query."""
        self.now = now
        self.mailbox.sent.clear()
        self.mailbox.script = [list(messages)]
        run_until_idle(self._loop, self.mailbox)
        self._loop.handle_messages(0.0)
        sent = self.mailbox.sent
        return [(name, status.query_id) for name, status in sent if isinstance(status, ReplicaStatus)]

    def request(self, gateway: bytes) -> tuple[bytes, GatewayMessage]:
        return gateway, submit(next(self._handles), [5, 6], max_tokens=1)


def test_watching_gateways_get_a_status_after_each_change() -> None:
    loop = WatchedLoop()
    watch = [(name, StatusQuery(1, watch_s=40.0)) for name in (b"a", b"b")]
    loop.turn_at(100.0, *watch, (b"c", StatusQuery(1)))
    loop.turn_at(101.0)
    assert loop.turn_at(102.0) == []  # only times have changed
    assert loop.turn_at(103.0, loop.request(b"c")) == [(b"a", 0), (b"b", 0)]
    assert loop.turn_at(103.5, loop.request(b"c")) == []  # at most once per second
    assert loop.turn_at(104.0) == [(b"a", 0), (b"b", 0)]
    assert loop.turn_at(105.0) == []
    loop.mailbox.gone = {b"a"}
    assert loop.turn_at(106.0, loop.request(b"c")) == [(b"b", 0)]
    assert loop.turn_at(141.0, loop.request(b"c")) == []  # their time has ended


def test_watcher_of_the_load_is_not_told_of_canaries() -> None:
    loop = WatchedLoop()
    watch = [(b"a", StatusQuery(1, watch_s=40.0)), (b"load", StatusQuery(1, 40.0, load_only=True))]
    loop.turn_at(100.0, *watch, (b"c", submit(1, [5], max_tokens=1)))
    loop.turn_at(101.0)  # its block is cached now
    for handle, at in enumerate((103.0, 106.0, 109.0), 2):
        canary = submit(handle, [5], max_tokens=1)
        assert loop.turn_at(at, (b"c", canary)) == [(b"a", 0)]
    prompts = [(b"c", submit(handle, [handle] * 40, max_tokens=1)) for handle in (8, 9)]
    assert sorted(loop.turn_at(112.0, *prompts)) == [(b"a", 0), (b"load", 0)]
    loop.scheduler.drain(10.0, 113.0)
    assert (b"load", 0) in loop.turn_at(114.0)


def test_many_watching_gateways_take_turns() -> None:
    """A replica's reports do not grow with its gateways, and each is told of the latest change."""
    loop = WatchedLoop()
    names = [b"%d" % number for number in range(50)]
    loop.turn_at(100.0, *((name, StatusQuery(1, watch_s=40.0)) for name in names))
    assert loop._loop.status().num_report_rounds == 3
    for at in (101.0, 102.0):  # until all know that it is idle
        loop.turn_at(at)
    told = [[name for name, _ in loop.turn_at(103.0, loop.request(b"c"))]]
    told += [[name for name, _ in loop.turn_at(at)] for at in (103.5, 104.0, 105.0, 106.0)]
    assert told == [names[:20], [], names[20:40], names[40:], []]
    told = [[name for name, _ in loop.turn_at(at, loop.request(b"c"))] for at in (107.0, 108.0, 109.0)]
    assert told == [names[:20], names[20:40], names[40:] + names[:10]]


def test_gateways_get_the_same_status_object() -> None:
    """ZmqMailbox encodes it once."""
    loop = WatchedLoop()
    loop.turn_at(100.0, *((name, StatusQuery(1, watch_s=40.0)) for name in (b"a", b"b")))
    loop.turn_at(103.0, loop.request(b"c"))
    first, second = (status for _, status in loop.mailbox.sent if isinstance(status, ReplicaStatus))
    assert first is second


def test_status_tells_when_the_latest_step_was_computed() -> None:
    loop = WatchedLoop()
    assert loop._loop.status().last_step_s == math.inf
    loop.turn_at(110.0, loop.request(b"c"))
    loop.turn_at(117.0)
    assert loop._loop.status().last_step_s == 7.0


def test_block_map_query_is_answered() -> None:
    mailbox = FakeMailbox([[(b"a", BlockMapQuery(7))]])
    loop, _, _ = make_loop(mailbox)
    loop.handle_messages(0.0)
    ((gateway, answer),) = mailbox.sent
    assert gateway == b"a"
    assert instance_of(BlockMap, answer).query_id == 7


def test_cache_query_returns_changes() -> None:
    mailbox = FakeMailbox([[(b"a", submit(1, [5] * 9, max_tokens=1))]])
    loop, _, _ = make_loop(mailbox)
    run_until_idle(loop, mailbox)
    mailbox.script = [[(b"b", CacheQuery(0))]]
    run_until_idle(loop, mailbox)
    ((gateway, report),) = [sent for sent in mailbox.sent if isinstance(sent[1], CacheReport)]
    assert gateway == b"b"
    assert instance_of(CacheReport, report).added == b"".join(
        reversed(prefix_hashes([5] * 9, 4, make_root("fake")))
    )


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/mailbox"


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    return socket


def test_loop_serves_over_a_socket_until_stopped(endpoint: str) -> None:
    mailbox = ZmqMailbox(endpoint)
    loop, _, _ = make_loop(mailbox)
    thread = threading.Thread(target=loop.run)
    thread.start()
    with zmq.Context() as context, dealer(context, endpoint) as socket:
        socket.send(b"no such message")
        socket.send(stream.encode(submit(3, [5, 6], max_tokens=6)))
        token_ids: list[int] = []
        finished: tuple[Finish, ...] = ()
        while not finished:
            batch = instance_of(TokenBatch, stream.decode(socket.recv()))
            token_ids += batch.token_ids.tolist()
            finished = batch.finished
        assert token_ids == oracle([5, 6], 6)
        socket.send(stream.encode(submit(4, [5, 6], max_tokens=10**6)))
        loop.stop()
        thread.join(60)
        assert not thread.is_alive()
    mailbox.close()
    mailbox.close()
    loop.stop()  # does nothing any more


def test_zmq_mailbox_send_fails_for_unknown_gateway(endpoint: str) -> None:
    mailbox = ZmqMailbox(endpoint)
    with zmq.Context() as context, dealer(context, endpoint) as socket:
        socket.send(stream.encode(Abort(1)))
        ((gateway, message),) = mailbox.receive(60.0)
        assert message == Abort(1)
        assert mailbox.send(gateway, TokenBatch(1, np.array([1], np.int32), np.array([2], np.int32)))
        assert instance_of(TokenBatch, stream.decode(socket.recv())).token_ids.tolist() == [2]
    assert not mailbox.send(b"unknown", TokenBatch(1))
    mailbox.close()


def test_zmq_mailbox_bounds_the_messages_per_receive(endpoint: str) -> None:
    mailbox = ZmqMailbox(endpoint)
    with zmq.Context() as context, dealer(context, endpoint) as socket:
        for handle in range(MAX_MESSAGES_AT_ONCE + 5):
            socket.send(b"no such message" if handle % 2 else stream.encode(Abort(handle)))
        taken: list[int] = []
        most = 0
        while len(taken) < MAX_MESSAGES_AT_ONCE // 2 + 3:
            part = [instance_of(Abort, message).handle for _, message in mailbox.receive(60.0)]
            taken += part
            most = max(most, len(part))
    assert taken == list(range(0, MAX_MESSAGES_AT_ONCE + 5, 2))
    assert most <= MAX_MESSAGES_AT_ONCE // 2 + 1
    mailbox.close()


def test_zmq_mailbox_that_cannot_bind_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(zmq.ZMQError, match="Cannot assign"):
        ZmqMailbox(tcp_endpoint("203.0.113.9"), CurveKeys.generate())  # of a network kept for documentation
    assert set(threading.enumerate()) <= before


def test_zmq_mailbox_over_tcp_ignores_foreign_keys() -> None:
    keys = CurveKeys.generate()
    mailbox = ZmqMailbox(tcp_endpoint("127.0.0.1"), keys)
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as friend,
        context.socket(zmq.DEALER) as stranger,
    ):
        for socket, own in ((friend, keys), (stranger, CurveKeys.generate())):
            socket.setsockopt(zmq.LINGER, 0)
            connect(socket, mailbox.endpoint, own)
        stranger.send(stream.encode(Abort(1)))
        friend.send(stream.encode(Abort(2)))
        assert [message for _, message in mailbox.receive(60.0)] == [Abort(2)]
        assert mailbox.receive(0.3) == []
    mailbox.close()
