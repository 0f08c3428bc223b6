"""StepChannel: every frame arrives once and in order, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from quire.proto.channel import ChannelAddress, StepReceiver, StepSender
from quire.proto.errors import ReplicaUnavailable
from quire.proto.network import CurveKeys

NUM_RANKS = 2


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> Iterator[ChannelAddress]:
    """Where a sender may bind."""
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
    """A rank that answers each frame with itself and its rank."""

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
    sender.wait_for_ranks(10)
    frames = [number.to_bytes(4, "big") * (1 + number % 5000) for number in range(200)]
    for frame in frames:
        sender.send(frame)
    replies: list[list[bytes]] = [[] for _ in ranks]
    for _ in range(NUM_RANKS * len(frames)):
        reply = sender.receive(10)
        assert reply is not None
        replies[reply[-1]].append(reply[:-1])
    assert replies == [frames] * NUM_RANKS
    assert sender.receive(0) is None
    sender.close()
    for rank in ranks:
        rank.join(10)
        assert not rank.is_alive()


def test_rank_that_does_not_come_is_named(address: ChannelAddress) -> None:
    sender = StepSender(address, NUM_RANKS)
    echo(sender.address, 0)
    with pytest.raises(ReplicaUnavailable, match=r"ranks \[1\] did not join"):
        sender.wait_for_ranks(0.3)
    sender.close()


def test_interrupt_ends_a_receive_from_another_thread(address: ChannelAddress) -> None:
    sender = StepSender(address, NUM_RANKS)
    threading.Timer(0.1, sender.interrupt).start()
    started = time.monotonic()
    assert sender.receive(10) is None
    assert time.monotonic() - started < 5
    sender.close()
    sender.interrupt()  # does nothing any more


def test_close_removes_the_sockets_and_may_be_repeated(ipc_address: ChannelAddress) -> None:
    folder = Path(ipc_address.plans.removeprefix("ipc://")).parent
    sender = StepSender(ipc_address, NUM_RANKS)
    assert any(folder.iterdir())
    sender.close()
    sender.close()
    assert not any(folder.iterdir())


@pytest.mark.parametrize("connects", [False, True])
def test_a_rank_whose_scheduler_has_gone_without_a_word_says_so(connects: bool) -> None:
    sender = StepSender(ChannelAddress.on_host("127.0.0.1", CurveKeys.generate()), 1)
    address = sender.address
    if not connects:
        sender.close()
    ended: list[BaseException] = []

    def run() -> None:
        receiver = StepReceiver(address, 0, lost_s=1.0)
        with pytest.raises(
            ReplicaUnavailable, match="rank 0 has not reached the scheduler at tcp://"
        ) as caught:
            receiver.receive()
        ended.append(caught.value)
        receiver.close()

    rank = threading.Thread(target=run, daemon=True)
    rank.start()
    if connects:
        sender.wait_for_ranks(10)
        rank.join(1.5)
        assert rank.is_alive(), "an idle rank with a connection waits on"
        # As if its process had been killed: its sockets end, and no frame says so.
        assert sender._guard is not None
        sender._guard.close()
        sender._context.destroy(linger=0)
    rank.join(10)
    assert ended
