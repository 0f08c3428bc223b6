"""Exposition: the metrics of a gateway in Prometheus' text format or in OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .fleet_metrics import collect_fleet
from .replica_metrics import collect_replicas
from .request_metrics import RequestMetrics
from .samples import Samples
from .views import FleetView, ModelsView


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
        """Return a scrape's body and its content type, in the format that an Accept header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
