"""Export of traces to a collector over OTLP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ....proto.errors import ConfigError
from ...text.requests.observer import RequestObserver

_SHUTDOWN_TIMEOUT_MS = 3000


@contextmanager
def exported_traces(endpoint: str | None) -> Iterator[list[RequestObserver]]:
    """Yield the observers that send traces to an OTLP endpoint over gRPC: none without an endpoint.

    Spans are sent by a thread of the exporter; they are dropped, with a line in the log, while nothing answers there.
    What is left is sent when the block ends.

    Args:
        endpoint: ``http://HOST:PORT`` or ``https://HOST:PORT``. OpenTelemetry's own variables set headers and
            certificates (OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_SERVICE_NAME).

    Raises:
        ConfigError: the endpoint is no URL, or opentelemetry is not installed.
    """
    if endpoint is None:
        yield []
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}, must be http://HOST:PORT or https://HOST:PORT"
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from .request_traces import RequestTraces
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'quire[otel]'"
        ) from error
    resource = Resource.create({SERVICE_NAME: "quire"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield [RequestTraces(provider.get_tracer("quire"))]
    finally:
        provider.force_flush(_SHUTDOWN_TIMEOUT_MS)
        provider.shutdown()
