"""Exposition: the metrics of a gateway in Prometheus' text format or in OpenMetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from .fleet_metrics import collect_fleet
from .replica_metrics import collect_replicas
from .request_metrics import RequestMetrics
from .samples import Samples
from .views import FleetView, ModelsView

OPENMETRICS = "application/openmetrics-text"


class Exposition(Collector):
    """The metrics of one gateway. Scrapes read the values in the gateway's event loop.

    Args:
        fleet: None if the gateway has one replica of its own.
    """

    def __init__(self, models: ModelsView, requests: RequestMetrics, fleet: FleetView | None = None) -> None:
        self._models = models
        self._requests = requests
        self._fleet = fleet
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterable[Family]:
        """See `Collector`."""
        samples = Samples()
        for model in self._models:
            self._requests.add_model(model.name)
        self._requests.collect(samples)
        collect_replicas(samples, self._models)
        if self._fleet is not None:
            collect_fleet(samples, self._fleet.describe())
        return samples.families()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return a scrape's body and its content type: OpenMetrics if the Accept header names it, else text."""
        if OPENMETRICS in accept:
            # With other escapings, prometheus_client 0.26 writes vllm_ for vllm: in the samples of OpenMetrics.
            encode: Callable[..., bytes] = generate_openmetrics
            body = encode(self._registry, escaping=ALLOWUTF8)
            return body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
