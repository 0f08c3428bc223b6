"""CallLog: a line in the log for each request that begins, ends or is refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...text.requests.observer import MoveCause, ObservedCall
from ...text.requests.outputs import CompletionDelta, CompletionFinished, StreamEvent
from ...text.requests.request import Request
from .request_metrics import is_abort, reason_of

_log = logging.getLogger(__name__)


class CallLog:
    """RequestObserver that logs requests, without their texts.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def watch(self, call: ObservedCall) -> _Watch:
        return _Watch(call, self._clock)


class _Watch:
    """The lines of one request."""

    def __init__(self, call: ObservedCall, clock: Callable[[], float]) -> None:
        self._fields = {"request_id": call.request_id, "model": call.model, "tenant": call.tenant}
        self._clock = clock
        self._arrived_at = clock()
        self._first_token_s: float | None = None
        self._num_tokens = 0
        self._reasons: list[str] = []
        self._is_accepted = False

    def on_accepted(self, model: str, request: Request) -> None:
        self._is_accepted = True
        self._fields |= {"model": model, "request_id": request.request_id}
        num_prompt_tokens, sampling = len(request.prompt_token_ids), request.sampling
        self._write(
            f"began: {model}, {num_prompt_tokens} prompt tokens, max_tokens {sampling.max_tokens}, n {sampling.n}",
            num_prompt_tokens=num_prompt_tokens,
        )

    def on_event(self, event: StreamEvent) -> None:
        if isinstance(event, CompletionDelta):
            self._num_tokens += len(event.token_ids)
            if self._first_token_s is None:
                self._first_token_s = self._clock() - self._arrived_at
        elif isinstance(event, CompletionFinished):
            self._reasons.append(event.finish_reason)

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        self._write(f"lost its replica {replica_id}: {cause}", replica_id=replica_id, cause=cause.value)

    def on_end(self, error: BaseException | None) -> None:
        total_s = self._clock() - self._arrived_at
        if error is None:
            outcome = " and ".join(self._reasons) or "not read to its end"
        elif is_abort(error):
            outcome = "aborted"
        else:
            outcome = f"{reason_of(error)}: {error}"
        first = "" if self._first_token_s is None else f", first token after {self._first_token_s:.3f} s"
        self._write(
            f"{'ended' if self._is_accepted else 'refused'}: {outcome}, {self._num_tokens} tokens{first}, "
            f"{total_s:.3f} s in all",
            outcome=outcome,
            num_tokens=self._num_tokens,
            first_token_s=self._first_token_s,
            total_s=total_s,
        )

    def _write(self, text: str, **fields: object) -> None:
        _log.info(
            "request %s %s", self._fields["request_id"] or "without id", text, extra=self._fields | fields
        )
