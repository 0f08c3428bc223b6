import threading

import numpy as np
import pytest
import zmq
from fakes import FakeWorkerGroup, oracle, small_config, submit

from quire.proto import stream
from quire.proto.errors import RankFailed
from quire.proto.stream import Abort, GatewayMessage, ReplicaMessage, ReplicaStatus, StatusQuery, TokenBatch
from quire.scheduler.loop import StepLoop
from quire.scheduler.mailbox import ZmqMailbox
from quire.scheduler.scheduler import Scheduler


class FakeMailbox:
    """Hands out scripted messages, one list a call, and keeps what was sent."""

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


def make_loop(mailbox, **limits) -> tuple[StepLoop, Scheduler, FakeWorkerGroup]:
    config = small_config(**limits)
    scheduler, group = Scheduler(config), FakeWorkerGroup(config)
    return StepLoop(scheduler, group, mailbox, "replica-0"), scheduler, group


def run_until_idle(loop: StepLoop, mailbox: FakeMailbox) -> None:
    while mailbox.script or loop.step():
        loop._take_messages(0.0)


def answer(mailbox: FakeMailbox, handle: int) -> list[int]:
    batches = [message for _, message in mailbox.sent if isinstance(message, TokenBatch)]
    return [token for batch in batches for token in batch.token_ids[batch.handles == handle].tolist()]


def test_requests_of_two_gateways_are_answered():
    mailbox = FakeMailbox([[(b"a", submit(1, [5, 6], max_tokens=6))], [(b"b", submit(2, [7], max_tokens=4))]])
    loop, _, _ = make_loop(mailbox)
    run_until_idle(loop, mailbox)
    assert answer(mailbox, 1) == oracle([5, 6], 6)
    assert answer(mailbox, 2) == oracle([7], 4)
    assert {gateway for gateway, message in mailbox.sent} == {b"a", b"b"}


def test_a_status_query_is_answered_in_numbers():
    mailbox = FakeMailbox(
        [[(b"a", submit(1, [5] * 9, max_tokens=30, ignore_eos=True))], [(b"a", StatusQuery(7))]]
    )
    loop, _, _ = make_loop(mailbox)
    loop.step()
    loop._take_messages(0.0)
    loop.step()
    loop._take_messages(0.0)
    (status,) = [message for _, message in mailbox.sent if isinstance(message, ReplicaStatus)]
    assert (status.query_id, status.replica_id, status.num_running) == (7, "replica-0", 1)
    assert status.num_used_blocks == 3
    assert status.num_blocks == 31


def test_a_gateway_that_is_gone_loses_its_requests_and_no_other():
    mailbox = FakeMailbox(
        [[(b"a", submit(1, [5, 6], max_tokens=20, ignore_eos=True)), (b"b", submit(1, [7], max_tokens=3))]]
    )
    loop, scheduler, _ = make_loop(mailbox)
    mailbox.gone.add(b"a")
    run_until_idle(loop, mailbox)
    assert answer(mailbox, 1) == oracle([7], 3)
    assert not scheduler.has_work
    assert scheduler.blocks.num_held_blocks == 0


def test_an_abort_ends_a_request():
    mailbox = FakeMailbox([[(b"a", submit(1, [5], max_tokens=30, ignore_eos=True))], [(b"a", Abort(1))]])
    loop, scheduler, _ = make_loop(mailbox)
    run_until_idle(loop, mailbox)
    assert len(answer(mailbox, 1)) < 30
    assert scheduler.blocks.num_held_blocks == 0


def test_a_failed_rank_ends_the_loop_and_everyone_is_told():
    mailbox = FakeMailbox([[(b"a", submit(1, [5], max_tokens=30))]])
    loop, _, group = make_loop(mailbox)
    group.failure = RankFailed(1, "killed by signal 9", step_id=1)
    with pytest.raises(RankFailed, match="rank 1 failed at step 1: killed by signal 9"):
        loop.run()
    ((gateway, batch),) = mailbox.sent
    assert gateway == b"a"
    assert batch.finished[0].grpc_status == "UNAVAILABLE"
    assert "rank 1" in batch.finished[0].error


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/mailbox"


def dealer(context: zmq.Context, endpoint: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    return socket


def test_the_loop_serves_over_a_socket_and_stops_when_asked(endpoint):
    mailbox = ZmqMailbox(endpoint)
    loop, _, _ = make_loop(mailbox)
    thread = threading.Thread(target=loop.run)
    thread.start()
    with zmq.Context() as context, dealer(context, endpoint) as socket:
        socket.send(b"no such message")
        socket.send(stream.encode(submit(3, [5, 6], max_tokens=6)))
        told: list[int] = []
        finished: tuple = ()
        while not finished:
            batch = stream.decode(socket.recv())
            told += batch.token_ids.tolist()
            finished = batch.finished
        assert told == oracle([5, 6], 6)
        socket.send(stream.encode(submit(4, [5, 6], max_tokens=10**6)))
        loop.stop()
        thread.join(5)
        assert not thread.is_alive()
    mailbox.close()


def test_a_mailbox_notices_a_gateway_that_left(endpoint):
    mailbox = ZmqMailbox(endpoint)
    with zmq.Context() as context, dealer(context, endpoint) as socket:
        socket.send(stream.encode(Abort(1)))
        ((gateway, message),) = mailbox.receive(5.0)
        assert message == Abort(1)
        assert mailbox.send(gateway, TokenBatch(1, np.array([1], np.int32), np.array([2], np.int32)))
        assert stream.decode(socket.recv()).token_ids.tolist() == [2]
    assert not mailbox.send(b"nobody", TokenBatch(1))
    mailbox.close()
