"""run_batch: sends a batch's requests, several at once, and collects the responses in the output file."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ...client.wire.batch_files import BatchRequest, OutputFile, check_batch, read_batch
from .http_caller import HttpCaller, Server

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Numbers of requests.

    Attributes:
        num_resumed: answered by an earlier run.
        num_failed: answered with an HTTP status of 400 or above, in all runs.
    """

    num_requests: int
    num_resumed: int
    num_failed: int


def run_batch(
    input_path: Path,
    output_path: Path,
    server: Server,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda num_done, num_requests: None,
) -> BatchResult:
    """Run the requests of a file that the output file does not answer yet.

    Args:
        on_progress: called with the numbers of answered requests and of all, several times per second.

    Raises:
        ConfigError: a file cannot be used; nothing was sent.
        ServerUnreachable: the server was busy or away for too long. The answers so far are in the output file.
    """
    num_requests = check_batch(input_path)
    with OutputFile(output_path) as output:
        num_resumed = len(output.done)
        _Run(input_path, output, server, concurrency).run(lambda: on_progress(len(output.done), num_requests))
        return BatchResult(num_requests, num_resumed, output.num_failed)


class _Run:
    """The threads of one run: each takes a request, sends it and appends its answer."""

    def __init__(self, input_path: Path, output: OutputFile, server: Server, concurrency: int) -> None:
        self._requests = read_batch(input_path, frozenset(output.done))
        self._output = output
        self._pending: queue.Queue[BatchRequest | None] = queue.Queue(maxsize=concurrency)
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._callers = [HttpCaller(server, self._stop) for _ in range(concurrency)]
        # Daemons, so that Ctrl-C does not wait for responses.
        self._threads = [
            threading.Thread(target=self._work, args=(caller,), name="batch", daemon=True)
            for caller in self._callers
        ]

    def run(self, on_poll: Callable[[], None]) -> None:
        for thread in self._threads:
            thread.start()
        try:
            for request in chain(self._requests, [None] * len(self._threads)):
                self._put(request, on_poll)
            for thread in self._threads:
                while thread.is_alive() and self._failure is None:
                    thread.join(_POLL_S)
                    on_poll()
        finally:
            self._stop.set()
            for caller in self._callers:
                caller.close()
        if self._failure is not None:
            raise self._failure

    def _put(self, request: BatchRequest | None, on_poll: Callable[[], None]) -> None:
        """Wait for a thread that takes the request; give up after a failure."""
        while not self._stop.is_set():
            on_poll()
            with suppress(queue.Full):
                self._pending.put(request, timeout=_POLL_S)
                return

    def _work(self, caller: HttpCaller) -> None:
        try:
            while (request := self._pending.get()) is not None:
                self._output.append(request.custom_id, *caller.post(request.url, request.body))
        except Exception as error:
            if not self._stop.is_set():
                self._failure = error
                self._stop.set()
