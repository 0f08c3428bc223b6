"""RequestMetrics: counts and times the requests of a gateway."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ....proto.errors import (
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QuireError,
    QuotaExceeded,
    ReplicaUnavailable,
    RequestAborted,
    RequestNotFound,
    ShuttingDown,
    Unauthenticated,
)
from ....proto.stream import FinishReason
from ...text.requests.observer import MoveCause, ObservedCall
from ...text.requests.outputs import CompletionDelta, CompletionFinished, StreamEvent
from ...text.requests.request import Request
from . import catalog, request_definitions
from .definition import Kind, Metric
from .values import HistogramValue, Samples

ABORT, ERROR = "abort", "error"  # finished_reason of completions that did not end by themselves
INTERNAL = "internal"
# A series must begin at 0: from one that begins at 1, Prometheus computes no increase.
_ENDS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION
_NONE_FINISHED = dict.fromkeys((*(reason.value for reason in _ENDS), ABORT, ERROR), 0)
_NO_MOVES = dict.fromkeys((cause.value for cause in MoveCause), 0)
_NO_REFUSALS = dict.fromkeys(
    (
        kind.reason.lower()
        for kind in (
            DuplicateRequest,
            InvalidRequest,
            ModelNotFound,
            Overloaded,
            PermissionDenied,
            QuotaExceeded,
            ReplicaUnavailable,
            RequestNotFound,
            ShuttingDown,
            Unauthenticated,
        )
    ),
    0,
)

_HISTOGRAMS = tuple(metric for metric in catalog.GROUPS["Requests"] if metric.kind is Kind.HISTOGRAM)


@dataclass(slots=True)
class ModelRequests:
    """Totals of one model's requests since the gateway started.

    Attributes:
        num_open: requests that have not ended.
        finished: finished_reason |-> completions.
        moves: cause |-> sequences.
        errors: reason |-> requests.
    """

    num_open: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_recoveries: int = 0
    preempted_s: float = 0.0
    num_recomputed_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    histograms: dict[Metric, HistogramValue] = field(
        default_factory=lambda: {metric: HistogramValue(metric.buckets) for metric in _HISTOGRAMS}
    )


class RequestMetrics:
    """RequestObserver of all models. For one event loop.

    Args:
        clock: monotonic time in seconds.

    Attributes:
        models: name |-> its totals, for each model that had a request.
        refusals: reason |-> requests that never began.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.models: defaultdict[str, ModelRequests] = defaultdict(ModelRequests)
        self.refusals: Counter[str] = Counter()

    def watch(self, call: ObservedCall) -> _Watch:
        return _Watch(self, self._clock)

    def count_refusal(self, error: BaseException) -> None:
        """Count a call that ended before it was a request: without a token, malformed or invalid."""
        self.refusals[reason_of(error)] += 1

    def add_model(self, name: str) -> None:
        """Expose a model that may not have had a request yet."""
        _ = self.models[name]

    def collect(self, samples: Samples) -> None:
        """Add the samples of all models."""
        samples.add_counts(request_definitions.REFUSALS, (), _NO_REFUSALS | self.refusals)
        for name, model in self.models.items():
            self._collect_model(samples, (name,), model)

    def _collect_model(self, samples: Samples, labels: tuple[str], model: ModelRequests) -> None:
        for metric, value in (
            (request_definitions.OPEN_REQUESTS, model.num_open),
            (request_definitions.PROMPT_TOKENS, model.num_prompt_tokens),
            (request_definitions.CACHED_PROMPT_TOKENS, model.num_cached_tokens),
            (request_definitions.GENERATION_TOKENS, model.num_generated_tokens),
            (request_definitions.RECOVERIES, model.num_recoveries),
            (request_definitions.PREEMPTED_SECONDS, model.preempted_s),
            (request_definitions.RECOMPUTED_TOKENS, model.num_recomputed_tokens),
        ):
            samples.add(metric, labels, value)
        samples.add_counts(request_definitions.REQUEST_SUCCESS, labels, _NONE_FINISHED | model.finished)
        samples.add_counts(request_definitions.MOVES, labels, _NO_MOVES | model.moves)
        samples.add_counts(request_definitions.ERRORS, labels, model.errors)
        for metric, histogram in model.histograms.items():
            samples.add_histogram(metric, labels, histogram)


class _Watch:
    """Times one request."""

    __slots__ = (
        "_arrived_at",
        "_clock",
        "_inter_token",
        "_last_token_at",
        "_metrics",
        "_model",
        "_num_failed_over",
        "_num_finished",
        "_request",
    )

    def __init__(self, metrics: RequestMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = clock()
        self._model: ModelRequests | None = None
        self._request: Request | None = None
        self._last_token_at: dict[int, float] = {}  # completion |-> time of its latest token
        self._num_finished = 0
        self._num_failed_over = 0

    def on_accepted(self, model: str, request: Request) -> None:
        self._model, self._request = self._metrics.models[model], request
        self._inter_token = self._model.histograms[request_definitions.INTER_TOKEN_LATENCY]
        self._model.num_open += 1
        sampling = request.sampling
        self._observe(request_definitions.REQUEST_PARAMS_N, sampling.n)
        if sampling.max_tokens is not None:
            self._observe(request_definitions.REQUEST_PARAMS_MAX_TOKENS, sampling.max_tokens)

    def on_event(self, event: StreamEvent) -> None:
        if isinstance(event, CompletionDelta):
            self._on_delta(event)
        elif isinstance(event, CompletionFinished):
            self._on_finished(event)

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        assert self._model is not None, "only an accepted request can move"
        self._model.moves[cause.value] += 1
        self._num_failed_over += cause is MoveCause.FAILURE

    def on_end(self, error: BaseException | None) -> None:
        if self._model is None or self._request is None:
            if error is not None and not is_abort(error):
                self._metrics.count_refusal(error)
            return
        self._model.num_open -= 1
        if not (num_left := self._request.sampling.n - self._num_finished):
            return
        if error is None or is_abort(error):
            self._model.finished[ABORT] += num_left
        else:
            self._model.finished[ERROR] += num_left
            self._model.errors[reason_of(error)] += 1

    def _on_delta(self, delta: CompletionDelta) -> None:
        """Count the tokens. A delta without tokens (the rest of a text) is not timed."""
        num_tokens = len(delta.token_ids)
        if not num_tokens or self._model is None:
            return
        now = self._clock()
        self._model.num_generated_tokens += num_tokens
        last = self._last_token_at.get(delta.index)
        self._last_token_at[delta.index] = now
        if last is not None:
            self._inter_token.observe((now - last) / num_tokens, num_tokens)
        else:
            self._on_first_token(now)
            self._inter_token.observe(0.0, num_tokens - 1)

    def _on_first_token(self, now: float) -> None:
        assert self._model is not None
        assert self._request is not None
        if len(self._last_token_at) == 1:  # of the request
            self._model.num_prompt_tokens += len(self._request.prompt_token_ids)
        self._observe(request_definitions.TIME_TO_FIRST_TOKEN, now - self._arrived_at)

    def _on_finished(self, event: CompletionFinished) -> None:
        assert self._model is not None
        model, times, usage = self._model, event.timings, event.usage
        self._num_finished += 1
        if self._num_failed_over:
            self._num_failed_over -= 1
            model.num_recoveries += 1
        model.finished[event.finish_reason] += 1
        model.num_cached_tokens += usage.cached_tokens
        model.preempted_s += times.preempted_s
        model.num_recomputed_tokens += times.recomputed_tokens
        self._observe(request_definitions.E2E_LATENCY, self._clock() - self._arrived_at)
        self._observe(request_definitions.QUEUE_TIME, times.queued_s)
        self._observe(request_definitions.PREFILL_TIME, times.prefill_s)
        self._observe(request_definitions.DECODE_TIME, times.decode_s)
        self._observe(
            request_definitions.INFERENCE_TIME, times.prefill_s + times.decode_s + times.preempted_s
        )
        self._observe(request_definitions.REQUEST_PROMPT_TOKENS, usage.prompt_tokens)
        self._observe(request_definitions.REQUEST_GENERATION_TOKENS, usage.completion_tokens)
        if usage.completion_tokens > 1:
            self._observe(
                request_definitions.TIME_PER_OUTPUT_TOKEN, times.decode_s / (usage.completion_tokens - 1)
            )

    def _observe(self, metric: Metric, value: float) -> None:
        assert self._model is not None
        self._model.histograms[metric].observe(value)


def reason_of(error: BaseException) -> str:
    """Return the label of an error: its reason in lower case, ``internal`` if it is not an error of quire."""
    return error.reason.lower() if isinstance(error, QuireError) else INTERNAL


def is_abort(error: BaseException) -> bool:
    """Return whether the caller left or aborted the request."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit | RequestAborted)
