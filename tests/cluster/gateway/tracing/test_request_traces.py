"""RequestTraces: spans of a request, their parents, times and attributes, and their way to a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from quire.cluster.gateway.generation.generation import GenerationCall
from quire.cluster.gateway.grpc.inference import trace_headers
from quire.cluster.gateway.tracing.export import exported_traces
from quire.cluster.gateway.tracing.request_traces import RequestTraces
from quire.cluster.text.requests.observer import MoveCause, RequestObserver
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished
from quire.cluster.text.requests.request import Request
from quire.proto.errors import ConfigError, Overloaded
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Timings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL = GenerationCall("text", SamplingParams(), trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
REQUEST = Request("mine", np.arange(5, dtype=np.int32), SamplingParams(max_tokens=9, temperature=0.5))
SECOND = 1_000_000_000


class Clock:
    now = 0.0

    def __call__(self) -> int:
        return round(self.now * SECOND)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traces(exporter: InMemorySpanExporter, clock: Clock) -> Iterator[RequestTraces]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield RequestTraces(provider.get_tracer("test"), clock)
    provider.shutdown()


def run_request(observer: RequestObserver, clock: Clock | None = None) -> None:
    """Run a request of 10 seconds that moves once."""
    clock = clock or Clock()
    watch = observer.watch(CALL)
    watch.on_accepted("tiny", REQUEST)
    steps: list[tuple[float, Callable[[], None]]] = [
        (3.0, lambda: watch.on_event(CompletionDelta(0, "a", [1]))),
        (4.0, lambda: watch.on_moved("replica-1", MoveCause.FAILURE)),
        (6.0, lambda: watch.on_event(CompletionDelta(0, "b", [2, 3]))),
        (10.0, lambda: watch.on_event(CompletionFinished(0, "length", timings=Timings(1.0, 2.0, 5.0, 2.0)))),
        (10.0, lambda: watch.on_end(None)),
    ]
    for now, step in steps:
        clock.now = now
        step()


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / SECOND, span.end_time / SECOND


def test_spans_have_the_stages_below_the_callers_span(
    traces: RequestTraces, exporter: InMemorySpanExporter, clock: Clock
) -> None:
    run_request(traces, clock)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("llm_request")
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert seconds(root) == (0.0, 10.0)
    assert {name: seconds(span) for name, span in spans.items()} == {
        "move": (4.0, 6.0), "queue": (0.0, 1.0), "prefill": (1.0, 5.0), "decode": (5.0, 10.0),
    }  # fmt: skip
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    assert dict(root.attributes or {}) == {
        "gen_ai.response.model": "tiny", "gen_ai.request.id": "mine", "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9, "gen_ai.request.temperature": 0.5, "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 3, "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0, "gen_ai.latency.e2e": 10.0,
        "gen_ai.latency.time_in_model_prefill": 2.0, "gen_ai.latency.time_in_model_decode": 5.0,
        "gen_ai.latency.time_in_model_inference": 9.0,
    }  # fmt: skip


def test_recovered_completion_has_an_event(
    traces: RequestTraces, exporter: InMemorySpanExporter, clock: Clock
) -> None:
    watch = traces.watch(CALL)
    watch.on_accepted("tiny", REQUEST)
    clock.now = 10.0
    for index, num_recoveries in enumerate((0, 2)):
        timings = Timings(1.0, 2.0, 7.0, num_recoveries=num_recoveries, recovered_s=1.5 * num_recoveries)
        watch.on_event(CompletionFinished(index, "length", timings=timings))
    watch.on_end(None)
    *stages, root = exporter.get_finished_spans()
    expected = {"quire.num_recoveries": 2, "quire.recovered_s": 3.0}
    (event,) = root.events
    assert (event.name, dict(event.attributes or {})) == ("recovered", {"quire.index": 1, **expected})
    of_first, of_second = (dict(stages[number].attributes or {}) for number in (2, 5))
    assert "quire.num_recoveries" not in of_first
    assert expected.items() <= of_second.items()


def test_refused_request_is_a_span_with_an_error(
    traces: RequestTraces, exporter: InMemorySpanExporter
) -> None:
    traces.watch(GenerationCall("text", SamplingParams())).on_end(Overloaded("the queue is full"))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    assert "the queue is full" in str(span.status.description)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP collector that keeps the names of spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_at_the_latest_at_the_end() -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_collector: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_collector(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with exported_traces(f"http://127.0.0.1:{port}") as observers:
            run_request(observers[0])
    finally:
        server.stop(None)
    assert sorted(collector.names) == ["decode", "llm_request", "move", "prefill", "queue"]


def test_trace_context_comes_from_the_metadata_of_a_call() -> None:
    metadata = (("traceparent", "00-a-b-01"), ("authorization", "Bearer x"), ("tracestate", "v=1"))
    context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
    assert trace_headers(context) == {"traceparent": "00-a-b-01", "tracestate": "v=1"}


def test_without_an_endpoint_nothing_is_observed() -> None:
    with exported_traces(None) as observers:
        assert observers == []


def test_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is 'here:4317', must be http://HOST:PORT"):
        exported_traces("here:4317").__enter__()
