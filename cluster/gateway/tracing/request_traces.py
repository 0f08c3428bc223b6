"""RequestTraces: a span per request with the spans of its stages, under vLLM's names of attributes."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from ...text.requests.observer import MoveCause, ObservedCall
from ...text.requests.outputs import CompletionDelta, CompletionFinished, StreamEvent
from ...text.requests.request import Request

SPAN_NAME = "llm_request"
_PROPAGATOR = TraceContextTextMapPropagator()
_NS = 1_000_000_000


class RequestTraces:
    """RequestObserver that makes spans. Their times of stages are the scheduler's.

    Args:
        clock: Unix time in nanoseconds.
    """

    def __init__(self, tracer: Tracer, clock: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock = clock

    def watch(self, call: ObservedCall) -> _Watch:
        return _Watch(self._tracer, self._clock, call)


class _Watch:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, clock: Callable[[], int], call: ObservedCall) -> None:
        self._tracer, self._clock = tracer, clock
        self._arrived_ns = clock()
        parent = _PROPAGATOR.extract(call.trace_headers)
        self._span = tracer.start_span(SPAN_NAME, parent, SpanKind.SERVER, start_time=self._arrived_ns)
        self._context = set_span_in_context(self._span)
        self._moves: list[Span] = []  # that no token has ended yet
        self._first_token_ns: int | None = None
        self._num_tokens = 0

    def on_accepted(self, model: str, request: Request) -> None:
        sampling = request.sampling
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.response.model": model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        }
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def on_event(self, event: StreamEvent) -> None:
        if isinstance(event, CompletionDelta):
            self._on_delta(event)
        elif isinstance(event, CompletionFinished):
            self._on_finished(event)

    def on_moved(self, replica_id: str, cause: MoveCause) -> None:
        attributes = {"quire.replica": replica_id, "quire.cause": cause.value}
        self._moves.append(
            self._tracer.start_span("move", self._context, attributes=attributes, start_time=self._clock())
        )

    def on_end(self, error: BaseException | None) -> None:
        now = self._clock()
        self._end_moves(now)
        self._span.set_attribute("gen_ai.usage.completion_tokens", self._num_tokens)
        self._span.set_attribute("gen_ai.latency.e2e", (now - self._arrived_ns) / _NS)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end(now)

    def _on_delta(self, delta: CompletionDelta) -> None:
        self._num_tokens += len(delta.token_ids)
        if self._first_token_ns is None:
            self._first_token_ns = self._clock()
            seconds = (self._first_token_ns - self._arrived_ns) / _NS
            self._span.set_attribute("gen_ai.latency.time_to_first_token", seconds)
        if self._moves:
            self._end_moves(self._clock())

    def _end_moves(self, now: int) -> None:
        for move in self._moves:
            move.end(now)
        self._moves = []

    def _on_finished(self, event: CompletionFinished) -> None:
        """Add the stages of a completion; the last completion's times become the request's attributes."""
        now, times = self._clock(), event.timings
        decode_ns = now - round(times.decode_s * _NS)
        prefill_ns = decode_ns - round((times.prefill_s + times.preempted_s) * _NS)
        attributes: dict[str, AttributeValue] = {
            "quire.index": event.index,
            "gen_ai.response.finish_reasons": [event.finish_reason],
            "quire.preempted_s": times.preempted_s,
        }
        if times.num_recoveries:
            recovered = {"quire.num_recoveries": times.num_recoveries, "quire.recovered_s": times.recovered_s}
            attributes |= recovered
            self._span.add_event("recovered", {"quire.index": event.index, **recovered}, now)
        if times.transfer_s:
            attributes["quire.transfer_s"] = times.transfer_s
        for name, begin, end in (
            ("queue", self._arrived_ns, self._arrived_ns + round(times.queued_s * _NS)),
            ("prefill", prefill_ns, decode_ns),
            ("decode", decode_ns, now),
        ):
            span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=begin)
            span.end(end)
        self._span.set_attributes(
            {
                "gen_ai.latency.time_in_queue": times.queued_s,
                "gen_ai.latency.time_in_model_prefill": times.prefill_s,
                "gen_ai.latency.time_in_model_decode": times.decode_s,
                "gen_ai.latency.time_in_model_inference": times.prefill_s
                + times.decode_s
                + times.preempted_s,
            }
        )
