"""Load on a fleet, and queries of its status, for tests of whole clusters."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from quire import Client, FleetInfo, ReplicaInfo, SamplingParams

REQUEST_TIMEOUT_S = 300.0


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


class Load:
    """Sends requests from several threads, one after the other in each, during a ``with`` block.

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
            number += 1
