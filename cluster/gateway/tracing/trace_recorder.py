"""TraceRecorder: a file with the arrivals, lengths and shared prefixes of requests, without texts and tokens."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ....proto.digests import make_root, prefix_hashes
from ....proto.errors import ConfigError
from ...text.requests.observer import MoveCause, ObservedCall, RequestObserver
from ...text.requests.outputs import CompletionDelta, StreamEvent
from ...text.requests.request import Request

BLOCK_TOKENS = 16
# Requests that wait for the end of an earlier one, before that is written as it is.
_MOST_PENDING = 10_000

_log = logging.getLogger(__name__)


class TraceRecorder:
    """RequestObserver that writes a line of JSON per request, in order of arrival, as `quire simulate` reads it.

    Blocks of prompts are named by hashes with a key that is made anew by each process and never written: equal names
    mean equal beginnings, and nobody can test a guess of a text against them. Requests of different tenants or salts
    have no equal names, as they share no cache.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, file: IO[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._file, self._clock = file, clock
        self._key = secrets.token_hex(16)
        self._first_at: float | None = None
        self._pending: deque[_Watch] = deque()

    def watch(self, call: ObservedCall) -> _Watch:
        return _Watch(self)

    def close(self) -> None:
        """Write the requests that have not ended, with what they have so far."""
        self._write(len(self._pending))

    def accept(self, watch: _Watch, model: str, request: Request) -> float:
        """Keep the place of a request that is served; return its arrival, in seconds from the first one's."""
        now = self._clock()
        self._first_at = now if self._first_at is None else self._first_at
        self._pending.append(watch)
        if len(self._pending) > _MOST_PENDING:
            self._write(1)
        return now - self._first_at

    def since_first(self) -> float:
        """Return the seconds since the first request."""
        return self._clock() - (self._first_at or 0.0)

    def hashes(self, model: str, request: Request) -> list[int]:
        """Return the names of a prompt's full blocks."""
        root = make_root(
            f"{self._key}/{model}",
            request.salt,
            "" if request.lora is None else request.lora.cache_key,
            tenant=request.tenant,
            pool=request.prefix_pool,
        )
        names = prefix_hashes(request.prompt_token_ids, BLOCK_TOKENS, root, request.media)
        # Half of each: 32 bits are enough for prompts to differ, and short to write.
        return [int.from_bytes(name[:4], "little") for name in names]

    def flush(self) -> None:
        """Write the requests that have ended, up to the first that has not."""
        num_ended = next((place for place, each in enumerate(self._pending) if not each.has_ended), None)
        self._write(len(self._pending) if num_ended is None else num_ended)

    def _write(self, count: int) -> None:
        for _ in range(count):
            row = self._pending.popleft().row
            try:
                self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            except OSError as error:  # a full disk is no reason to serve nobody
                _log.warning("a request is missing in the recorded trace: %s", error)


class _Watch:
    """The line of one request."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self.row: dict[str, Any] = {}
        self.has_ended = False

    def on_accepted(self, model: str, request: Request) -> None:
        arrival_s = self._recorder.accept(self, model, request)
        hashes = self._recorder.hashes(model, request)
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens % BLOCK_TOKENS:  # the last, partial block is nobody else's
            hashes.append(secrets.randbits(32))
        self.row = {
            "arrival_s": round(arrival_s, 6),
            "prompt_tokens": num_prompt_tokens,
            "output_tokens": 0,
            "block_size": BLOCK_TOKENS,
            "prefix_block_hashes": hashes,
            "model": model,
        }

    def on_event(self, event: StreamEvent) -> None:
        if isinstance(event, CompletionDelta) and self.row:
            self.row["output_tokens"] += len(event.token_ids)
            if "ttft_s" not in self.row:
                self.row["ttft_s"] = self._elapsed_s()

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        self.row["moves"] = self.row.get("moves", 0) + 1

    def on_end(self, error: BaseException | None) -> None:
        self.has_ended = True
        if not self.row:  # it was refused
            return
        self.row["e2e_s"] = self._elapsed_s()
        if error is not None:
            self.row["error"] = type(error).__name__
        self._recorder.flush()

    def _elapsed_s(self) -> float:
        return round(self._recorder.since_first() - float(self.row["arrival_s"]), 6)


@contextmanager
def recorded_trace(path: Path | None) -> Iterator[list[RequestObserver]]:
    """Yield the observer that records requests in a new file: none without a path.

    Raises:
        ConfigError: the file cannot be made, or exists already.
    """
    if path is None:
        yield []
        return
    try:
        file = path.open("x", buffering=1)
    except OSError as error:
        raise ConfigError(f"record_trace: {path} cannot be made: {error.strerror}") from error
    recorder = TraceRecorder(file)
    try:
        yield [recorder]
    finally:
        recorder.close()
        with suppress(OSError):  # lines that a full disk did not take
            file.close()
