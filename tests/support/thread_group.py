"""Ranks as threads of one process, which run in turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.proto.model.parallel_split import ParallelSplit
from quire.worker.comm.pipeline import RecordableLink

RUN_TIMEOUT_S = 240.0

T = TypeVar("T")


class ThreadGroup:
    """Ranks that exchange tensors in memory; every rank computes the sums itself, in rank order.

    One rank runs at a time, until it needs the tensors of others. Ranks that run at the same time pass Python's
    lock back and forth around every operation of torch, and nearly all of their time is outside of torch.

    Args:
        timeout_s: most time that a rank waits for its turn.

    Attributes:
        num_meetings: meetings that each rank has come to.
    """

    # Entered by each thread while it runs a rank.
    around: Callable[[], AbstractContextManager[object]] = staticmethod(nullcontext)

    def __init__(self, size: int, timeout_s: float = 120) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(size)
        self._turns = [threading.Lock() for _ in range(size)]  # released for each turn
        for turn in self._turns:
            turn.acquire()
        self._ready: deque[int] = deque()  # ranks whose turns are next
        self._waiting: dict[
            tuple[int, ...], list[int]
        ] = {}  # members of a group |-> those that wait for the others
        self._tensors: dict[int, Tensor] = {}  # rank |-> its tensor
        self._gathered: dict[tuple[int, ...], Tensor] = {}  # members of a group |-> their tensors
        self._sent: dict[tuple[int, int, str], deque[Tensor]] = {}  # sender, receiver and kind |-> tensors
        # Sender and receiver |-> the memory of features that are expected.
        self.expected: dict[tuple[int, int], deque[Tensor]] = {}
        self._errors: list[BaseException] = []
        self.num_meetings = [0] * size  # by rank

    def communicator(self, rank: int, members: Sequence[int] | None = None) -> ThreadCommunicator:
        """Return the communicator of a rank, with all ranks or with some, of which it is one."""
        return ThreadCommunicator(self, rank, tuple(range(self.size) if members is None else members))

    def send(self, sender: int, receiver: int, kind: str, tensor: Tensor) -> None:
        self._sent.setdefault((sender, receiver, kind), deque()).append(tensor)

    def forget_sent(self) -> None:
        self._sent.clear()
        self.expected.clear()

    def receive(self, sender: int, receiver: int, kind: str) -> Tensor:
        """Return the next tensor of a kind; other ranks run until it is sent."""
        sent = self._sent.setdefault((sender, receiver, kind), deque())
        while not sent:
            if self._errors:
                raise ConnectionError(f"another rank failed: {self._errors[0]!r}")
            if not self._ready:
                raise ConnectionError(f"rank {receiver} waits for {kind} that rank {sender} does not send")
            self._ready.append(receiver)
            self._pass_turn()
            self._await_turn(receiver)
        return sent.popleft()

    def run(self, function: Callable[[Any], T], arguments: Sequence[Any]) -> list[T]:
        """Call the function with each rank's argument; raise the first error and end the other calls."""
        self._errors.clear()
        self._ready.extend(range(self.size))
        calls = [
            self._threads.submit(self._call, rank, function, argument)
            for rank, argument in zip(range(self.size), arguments, strict=True)
        ]
        self._pass_turn()
        wait(calls, timeout=RUN_TIMEOUT_S)
        if self._errors:
            raise self._errors[0]
        return [call.result(timeout=0) for call in calls]

    def exchange(self, rank: int, tensor: Tensor, members: tuple[int, ...]) -> Tensor:
        """Return the tensors of all members of a group, stacked; the ranks share the result."""
        self._tensors[rank] = tensor
        waiting = self._waiting.setdefault(members, [])
        if len(waiting) + 1 < len(members):
            waiting.append(rank)
            self._pass_turn()
            self._await_turn(rank)
        else:
            self._gathered[members] = torch.stack([self._tensors[each] for each in members])
            self._ready.extend(waiting)
            waiting.clear()
        if self._errors:
            raise threading.BrokenBarrierError(f"another rank failed: {self._errors[0]!r}")
        return self._gathered[members]

    def close(self) -> None:
        self._threads.shutdown()
        self._tensors.clear()
        self._gathered.clear()

    def _call(self, rank: int, function: Callable[[Any], T], argument: Any) -> T:
        self._await_turn(rank)
        try:
            with self.around():
                return function(argument)
        except BaseException as error:
            self._errors.append(error)
            self._release_waiting()
            raise
        finally:
            self._pass_turn()

    def _release_waiting(self) -> None:
        for waiting in self._waiting.values():
            self._ready.extend(waiting)
            waiting.clear()

    def _pass_turn(self) -> None:
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _await_turn(self, rank: int) -> None:
        if not self._turns[rank].acquire(timeout=self._timeout_s):
            raise threading.BrokenBarrierError(f"rank {rank} had no turn for {self._timeout_s:g} s")


class ThreadCommunicator:
    """The collectives of some ranks of a ThreadGroup.

    Args:
        own: number of the rank in the ThreadGroup.
    """

    def __init__(self, group: ThreadGroup, own: int, members: tuple[int, ...]) -> None:
        self._group, self._own, self._members = group, own, members
        self.rank, self.size = members.index(own), len(members)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._group.exchange(self._own, tensor, self._members).sum(dim=0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._group.exchange(self._own, tensor, self._members).clone()

    def all_to_all(self, rows: Tensor, counts: Sequence[Sequence[int]]) -> ThreadRows:
        for member, part in zip(self._members, rows.split(list(counts[self.rank])), strict=True):
            self._group.send(self._own, member, "all-to-all", part.clone())
        return ThreadRows(self._group, self._own, self._members)

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1))

    def meet(self, timeout_s: float) -> None:
        self._group.num_meetings[self._own] += 1
        self.barrier()

    def close(self, drop_recordings: Callable[[], object] = lambda: None) -> None:
        drop_recordings()


class ThreadRows:
    """The rows of an all-to-all."""

    def __init__(self, group: ThreadGroup, own: int, members: tuple[int, ...]) -> None:
        self._group, self._own, self._members = group, own, members

    def wait(self) -> Tensor:
        return torch.cat([self._group.receive(each, self._own, "all-to-all") for each in self._members])


class ThreadLink(RecordableLink):
    """The link of a rank to the pipeline stages before and after it."""

    awaited = ""

    def __init__(self, group: ThreadGroup, rank: int, split: ParallelSplit) -> None:
        super().__init__()
        self._group, self._rank, self._size = group, rank, split.tensor
        self._first = rank % split.tensor
        self._last = split.result_rank + self._first
        self._others = [each for each in range(self._first, split.num_ranks, split.tensor) if each != rank]

    def take_waited_s(self) -> float:
        return 0.0

    def transmit(self, states: Tensor) -> None:
        self._group.send(self._rank, self._rank + self._size, "states", states)

    def fill(self, out: Tensor) -> Tensor:
        return out.copy_(self._group.receive(self._rank - self._size, self._rank, "states"))

    def send_tokens(self, token_ids: Tensor, *, to_all: bool = False) -> None:
        for rank in self._others if to_all else [self._first]:
            self._group.send(self._rank, rank, "tokens", token_ids)

    def close(self) -> None:
        super().close()
        self._group.forget_sent()

    def receive_tokens(self, count: int) -> ThreadArrival:
        return ThreadArrival(self._group, self._last, self._rank, count)

    def send_drafts(self, drafts: Tensor) -> None:
        for rank in self._others:
            self._group.send(self._rank, rank, "drafts", drafts)

    def receive_drafts(self, count: int) -> Tensor:
        drafts = self._group.receive(self._first, self._rank, "drafts")
        assert len(drafts) == count
        return drafts

    def send_features(self, features: Tensor) -> None:
        self._group.send(self._rank, self._first, "features", features)

    def expect_features(self, stage: int, out: Tensor) -> None:
        key = stage * self._size + self._first, self._rank
        self._group.expected.setdefault(key, deque()).append(out)

    def take_features(self, stage: int) -> Tensor:
        sender = stage * self._size + self._first
        out = self._group.expected[sender, self._rank].popleft()
        return out.copy_(self._group.receive(sender, self._rank, "features"))


class ThreadArrival:
    def __init__(self, group: ThreadGroup, sender: int, receiver: int, count: int) -> None:
        self._group, self._sender, self._receiver, self._count = group, sender, receiver, count

    def wait(self) -> Tensor:
        token_ids = self._group.receive(self._sender, self._receiver, "tokens")
        assert len(token_ids) == self._count
        return token_ids
