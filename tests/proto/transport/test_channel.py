"""StepChannel: every frame arrives once and in order, and every wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from quire.proto.errors import ReplicaUnavailable
from quire.proto.transport.channel import ChannelAddress, StepReceiver, StepSender
from quire.proto.transport.network import CurveKeys

NUM_RANKS = 2


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> Iterator[ChannelAddress]:
    """Address for a sender to bind."""
    if request.param == "tcp":
        yield ChannelAddress.on_host("127.0.0.1", CurveKeys.generate())
        return
    with TemporaryDirectory(prefix="qt-") as folder:
        yield ChannelAddress.in_directory(Path(folder))


@pytest.fixture
def ipc_address() -> Iterator[ChannelAddress]:
    with TemporaryDirectory(prefix="qt-") as folder:
        yield ChannelAddress.in_directory(Path(folder))


def echo(address: ChannelAddress, rank: int) -> threading.Thread:
    """Start a rank that replies to each frame with the frame and its rank."""

    def run() -> None:
        receiver = StepReceiver(address, rank)
        while (frame := receiver.receive()) is not None:
            receiver.reply(frame + bytes((rank,)))
        receiver.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_frames_arrive_once_and_in_order(address: ChannelAddress) -> None:
    sender = StepSender(address, NUM_RANKS)
    ranks = [echo(sender.address, rank) for rank in range(NUM_RANKS)]
    sender.wait_for_ranks(60)
    frames = [number.to_bytes(4, "big") * (1 + number % 5000) for number in range(200)]
    for frame in frames:
        sender.send(frame)
    replies: list[list[bytes]] = [[] for _ in ranks]
    for _ in range(NUM_RANKS * len(frames)):
        reply = sender.receive(60)
        assert reply is not None
        replies[reply[-1]].append(reply[:-1])
    assert replies == [frames] * NUM_RANKS
    assert sender.receive(0) is None
    sender.close()
    for rank in ranks:
        rank.join(60)
        assert not rank.is_alive()


def test_missing_rank_is_named(address: ChannelAddress) -> None:
    sender = StepSender(address, NUM_RANKS)
    echo(sender.address, 0)
    joined_by = time.monotonic() + 60
    message = ""
    while (
        "ranks [1] did not join" not in message and time.monotonic() < joined_by
    ):  # rank 0 may need some time to join
        with pytest.raises(ReplicaUnavailable, match=r"1\] did not join the channel in 0 s") as caught:
            sender.wait_for_ranks(0.1)
        message = str(caught.value)
    assert "ranks [1] did not join" in message
    sender.close()


def test_sender_that_cannot_bind_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(zmq.ZMQError, match="Cannot assign"):
        # An address reserved for documentation.
        StepSender(ChannelAddress.on_host("203.0.113.9", CurveKeys.generate()), NUM_RANKS)
    assert set(threading.enumerate()) <= before


def test_interrupt_ends_a_receive_from_another_thread(address: ChannelAddress) -> None:
    sender = StepSender(address, NUM_RANKS)
    threading.Timer(0.1, sender.interrupt).start()
    started = time.monotonic()
    assert sender.receive(120) is None
    assert time.monotonic() - started < 60
    sender.close()
    sender.interrupt()  # does nothing


def test_interrupts_during_close_do_not_block_it() -> None:
    for _ in range(20):
        with TemporaryDirectory(prefix="qt-") as folder:
            sender = StepSender(ChannelAddress.in_directory(Path(folder)), NUM_RANKS)
            start = threading.Barrier(3)

            def interrupt(sender: StepSender = sender, start: threading.Barrier = start) -> None:
                start.wait(60)
                for _ in range(20):
                    sender.interrupt()

            threads = [threading.Thread(target=interrupt, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            start.wait(60)
            closing = threading.Thread(target=sender.close, args=(0.0,), daemon=True)
            closing.start()
            for thread in (*threads, closing):
                thread.join(60)
                assert not thread.is_alive()


def test_close_removes_the_sockets_and_may_be_repeated(ipc_address: ChannelAddress) -> None:
    folder = Path(ipc_address.plans.removeprefix("ipc://")).parent
    sender = StepSender(ipc_address, NUM_RANKS)
    assert any(folder.iterdir())
    sender.close()
    sender.close()
    assert not any(folder.iterdir())


@pytest.mark.parametrize("connects", [False, True])
def test_rank_without_connection_to_its_scheduler_fails(connects: bool) -> None:
    sender = StepSender(ChannelAddress.on_host("127.0.0.1", CurveKeys.generate()), 1)
    address = sender.address
    if not connects:
        sender.close()
    ended: list[BaseException] = []
    receivers: list[StepReceiver] = []

    def run() -> None:
        # On a busy machine connecting takes a while.
        receiver = StepReceiver(address, 0, lost_s=60.0 if connects else 1.0)
        receivers.append(receiver)
        with pytest.raises(
            ReplicaUnavailable, match="rank 0 has not reached the scheduler at tcp://"
        ) as caught:
            receiver.receive()
        ended.append(caught.value)
        receiver.close()

    rank = threading.Thread(target=run, daemon=True)
    rank.start()
    if connects:
        sender.wait_for_ranks(60)
        receivers[0]._lost_s = 1.0
        rank.join(1.5)
        assert rank.is_alive(), "a connected idle rank must keep waiting"
        # As if its process had been killed: the sockets close without an end frame.
        assert sender._guard is not None
        sender._guard.close()
        sender._context.destroy(linger=0)
    rank.join(60)
    assert ended


@pytest.mark.parametrize("has_reply", [False, True])
def test_rank_whose_sender_has_ended_does_not_linger(address: ChannelAddress, has_reply: bool) -> None:
    """A rank with a reply that nobody receives any more is interrupted before it joins the next group."""
    sender = StepSender(address, 1)
    receiver = StepReceiver(sender.address, 0)
    greeted = threading.Thread(target=receiver.receive, daemon=True)
    greeted.start()
    sender.wait_for_ranks(60)
    sender.close()
    greeted.join(60)
    if has_reply:
        receiver.reply(b"a failure")
        receiver.interrupt()
    closing = threading.Thread(target=receiver.close, args=(600.0,), daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
