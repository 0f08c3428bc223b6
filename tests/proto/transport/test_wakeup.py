"""Wakeup ends a poll from another thread, and never blocks the end of its context."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from quire.proto.transport.wakeup import Wakeup

DEADLINE_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_wake_ends_a_poll_from_another_thread(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    wakeup = Wakeup(context)
    threading.Timer(0.1, wakeup.wake).start()
    started = time.monotonic()
    assert wakeup.socket.poll(2 * 1000 * DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S
    wakeup.close()


def test_clear_forgets_every_wake_before_it_and_none_after(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    wakeup = Wakeup(context)
    wakeup.wake()
    wakeup.wake()
    wakeup.clear()
    assert not wakeup.socket.poll(0)
    wakeup.wake()
    assert wakeup.socket.poll(1000 * DEADLINE_S)
    wakeup.close()


def test_two_wakeups_of_one_context_are_independent(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    one, other = Wakeup(context), Wakeup(context)
    one.wake()
    assert one.socket.poll(1000 * DEADLINE_S)
    assert not other.socket.poll(0)
    one.close()
    other.close()


def test_wake_after_close_does_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    wakeup = Wakeup(context)
    wakeup.close()
    wakeup.close()
    wakeup.wake()


def test_waking_during_close_does_not_block_context_termination() -> None:
    for _ in range(20):
        context = zmq.Context()
        wakeup = Wakeup(context)
        start = threading.Barrier(3)

        def wake(wakeup: Wakeup = wakeup, start: threading.Barrier = start) -> None:
            start.wait(DEADLINE_S)
            for _ in range(20):
                wakeup.wake()

        def close(wakeup: Wakeup = wakeup, context: zmq.Context[zmq.Socket[bytes]] = context) -> None:
            wakeup.close()
            context.term()

        threads = [threading.Thread(target=wake, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait(DEADLINE_S)
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        for thread in (*threads, closing):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
