"""InMemoryMailbox: the mailbox of offline inference."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fakes import FakeWorkerGroup, oracle, small_config, submit

from quire.proto.errors import ReplicaUnavailable, from_status
from quire.proto.stream import Abort, FinishReason, ReplicaMessage, TokenBatch
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.mailbox import InMemoryMailbox


def test_receive_returns_all_messages_in_order() -> None:
    mailbox = InMemoryMailbox()
    for handle in range(3):
        mailbox.post(b"a", Abort(handle))
    assert mailbox.receive(60.0) == [(b"a", Abort(handle)) for handle in range(3)]
    assert mailbox.receive(0.0) == []


@pytest.mark.parametrize("end", ["post", "wake"])
def test_receive_waits_until_another_thread_posts_or_wakes(end: str) -> None:
    mailbox = InMemoryMailbox()
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.append(mailbox.receive(60.0)))
    thread.start()
    if end == "post":
        mailbox.post(b"a", Abort(1))
    else:
        mailbox.wake()
    thread.join(60.0)
    assert received == [[(b"a", Abort(1))] if end == "post" else []]


def test_send_fails_for_unknown_gateway() -> None:
    mailbox = InMemoryMailbox()
    sent: list[ReplicaMessage] = []
    mailbox.connect(b"a", sent.append)
    assert mailbox.send(b"a", TokenBatch(1))
    assert not mailbox.send(b"b", TokenBatch(1))
    assert sent == [TokenBatch(1)]


def test_loop_serves_an_in_memory_gateway_until_it_stops_the_loop() -> None:
    config, mailbox = small_config(), InMemoryMailbox()
    scheduler = Scheduler(config)
    loop = StepLoop(scheduler, FakeWorkerGroup(config), mailbox, "replica-0")
    batches: list[TokenBatch] = []

    def on_message(message: ReplicaMessage) -> None:
        assert isinstance(message, TokenBatch)
        batches.append(message)
        if any(finish.handle == 1 for finish in message.finished):
            loop.stop()

    mailbox.connect(b"a", on_message)
    mailbox.post(b"a", submit(1, [5, 6], max_tokens=6))
    mailbox.post(b"a", submit(2, [7], max_tokens=50, ignore_eos=True))
    loop.run()
    assert [token for batch in batches for token in batch.token_ids[batch.handles == 1].tolist()] == oracle(
        [5, 6], 6
    )
    (ended,) = [finish for batch in batches for finish in batch.finished if finish.handle == 2]
    assert ended.reason is FinishReason.ERROR
    assert isinstance(from_status(ended.grpc_status, ended.error), ReplicaUnavailable)
    assert not scheduler.has_work
    assert scheduler.blocks.num_held_blocks == 0
