"""Load on a fleet, and queries of its status, for tests of whole clusters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from quire import Client, FleetInfo, ReplicaInfo, SamplingParams

REQUEST_TIMEOUT_S = 300.0
# Long enough that reading its blocks is faster than computing them.
_TALE = " ".join(
    f"The {number}th traveler came to the inn in the evening, and asked for a room." for number in range(12)
)
_numbers = itertools.count()


def new_prompts(count: int = 1000) -> list[str]:
    """Return prompts whose prefix no replica has, whatever an earlier test has asked for."""
    numbers = itertools.islice(_numbers, count)
    return [f"{number} chapters. {_TALE} It was a dark evening, and" for number in numbers]


def wait_for(client: Client, holds: Callable[[FleetInfo], bool], timeout_s: float) -> FleetInfo:
    """Return the first status for which the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not holds(status := client.fleet()):
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


def ready(status: FleetInfo) -> list[ReplicaInfo]:
    """Return the replicas that the gateway sends requests to."""
    return [replica for replica in status.replicas if replica.ready]


def rank_pids(status: FleetInfo) -> set[int]:
    """Return the processes of the ranks of ready replicas."""
    return {rank.pid for replica in ready(status) for rank in replica.ranks}


def num_pulls(status: FleetInfo) -> int:
    """Return the number of times that blocks came from another replica."""
    return sum(replica.kv.num_kv_pulls for replica in status.replicas)


class Load:
    """Sends requests from several threads, one after the other in each, during a ``with`` block.

    Each prompt is asked for once, until all were asked for.

    Attributes:
        outputs: (prompt, token ids) of every request; filled when the block ends, which raises the first error of a
            request.
    """

    def __init__(self, client: Client, prompts: list[str], params: SamplingParams, num_threads: int) -> None:
        self.outputs: list[tuple[str, tuple[int, ...]]] = []
        self._client = client
        self._prompts = prompts
        self._params = params
        self._num_threads = num_threads
        self._is_over = False

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(self._num_threads)
        self._running = [self._threads.submit(self._ask, first) for first in range(self._num_threads)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if error is None:
            for each in self._running:
                self.outputs += each.result(REQUEST_TIMEOUT_S)
        self._threads.shutdown(wait=error is None, cancel_futures=True)

    def _ask(self, first: int) -> list[tuple[str, tuple[int, ...]]]:
        outputs, number = [], first
        while True:
            prompt = self._prompts[number % len(self._prompts)]
            (output,) = self._client.generate(prompt, self._params).outputs
            outputs.append((prompt, tuple(output.token_ids)))
            if self._is_over:
                return outputs
            number += self._num_threads
