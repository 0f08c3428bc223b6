"""Client side of the demo: each request runs in its own thread and records its progress."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from ....proto.errors import QuireError
from ...client.client import Client
from ...text.requests.outputs import CompletionDelta, CompletionFinished
from .prompts import DemoRequest


@dataclass(slots=True)
class Stream:
    """A running request. Only its thread writes; other threads read.

    Attributes:
        first_token_s: seconds from submission to the first token; None before the first token.
        gaps_s: seconds between consecutive tokens; tokens of one delta share the time since the previous delta.
        finished: the final event; None while the request runs or if it failed.
        error: the reason of a failure.
    """

    request: DemoRequest
    text: str = ""
    num_tokens: int = 0
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    finished: CompletionFinished | None = None
    error: QuireError | None = None

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.error is not None

    def run(self, client: Client) -> None:
        """Submit the request and read its events until it ends."""
        submitted = last = time.monotonic()
        try:
            for event in client.generate_stream(self.request.prompt, self.request.params):
                if isinstance(event, CompletionDelta) and event.token_ids:
                    now = time.monotonic()
                    self._append(event, now - last, now - submitted)
                    last = now
                elif isinstance(event, CompletionDelta):
                    self.text += event.text
                elif isinstance(event, CompletionFinished):
                    self.finished = event
        except QuireError as error:
            self.error = error

    def _append(self, delta: CompletionDelta, gap_s: float, since_submission_s: float) -> None:
        self.text += delta.text
        num_tokens = len(delta.token_ids)
        if self.first_token_s is None:
            self.first_token_s = since_submission_s
            num_tokens -= 1
        self.gaps_s += [gap_s / len(delta.token_ids)] * num_tokens
        self.num_tokens += len(delta.token_ids)


class Streams:
    """All requests, running concurrently."""

    def __init__(self, client: Client, requests: tuple[DemoRequest, ...]) -> None:
        self.streams = [Stream(request) for request in requests]
        self.wall_s = 0.0
        self._threads = [
            threading.Thread(target=stream.run, args=(client,), daemon=True) for stream in self.streams
        ]

    def start(self) -> None:
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all requests have ended; return False if the timeout passes first."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.wall_s = time.monotonic() - self._started
        return not any(thread.is_alive() for thread in self._threads)
