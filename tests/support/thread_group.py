"""Ranks as threads of one process, which run in turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

RUN_TIMEOUT_S = 240.0

T = TypeVar("T")


class ThreadGroup:
    """Ranks that exchange tensors in memory; every rank computes the sums itself, in rank order.

    One rank runs at a time, until it needs the tensors of the others. Ranks that run at the same time pass Python's
    lock back and forth around every operation of torch, and nearly all of their time is outside of torch.

    Args:
        timeout_s: most time that a rank waits for its turn.

    Attributes:
        num_meetings: meetings that each rank has come to.
    """

    def __init__(self, size: int, timeout_s: float = 120) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(size)
        self._turns = [threading.Lock() for _ in range(size)]  # released for each turn
        for turn in self._turns:
            turn.acquire()
        self._ready: deque[int] = deque()  # ranks whose turns are next
        self._waiting: list[int] = []  # ranks that need the tensors of the others
        self._tensors: dict[int, Tensor] = {}  # rank |-> its tensor
        self._gathered = torch.empty(0)
        self._errors: list[BaseException] = []
        self.num_meetings = [0] * size  # by rank

    def communicator(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self, rank)

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

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked; the ranks share the result."""
        self._tensors[rank] = tensor
        if len(self._waiting) + 1 < self.size:
            self._waiting.append(rank)
            self._pass_turn()
            self._await_turn(rank)
        else:
            self._gathered = torch.stack([self._tensors[each] for each in range(self.size)])
            self._release_waiting()
        if self._errors:
            raise threading.BrokenBarrierError(f"another rank failed: {self._errors[0]!r}")
        return self._gathered

    def close(self) -> None:
        self._threads.shutdown()

    def _call(self, rank: int, function: Callable[[Any], T], argument: Any) -> T:
        self._await_turn(rank)
        try:
            return function(argument)
        except BaseException as error:
            self._errors.append(error)
            self._release_waiting()
            raise
        finally:
            self._pass_turn()

    def _release_waiting(self) -> None:
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def _pass_turn(self) -> None:
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _await_turn(self, rank: int) -> None:
        if not self._turns[rank].acquire(timeout=self._timeout_s):
            raise threading.BrokenBarrierError(f"rank {rank} had no turn for {self._timeout_s:g} s")


class ThreadCommunicator:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._group.exchange(self.rank, tensor).sum(dim=0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._group.exchange(self.rank, tensor).clone()

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1))

    def meet(self, timeout_s: float) -> None:
        self._group.num_meetings[self.rank] += 1
        self.barrier()

    def close(self, drop_recordings: Callable[[], object] = lambda: None) -> None:
        drop_recordings()
