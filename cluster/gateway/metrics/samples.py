"""Samples: what one scrape collects, as metric families of prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from . import catalog
from .definition import Kind, Metric
from .values import HistogramValue

_FAMILIES: dict[Kind, Callable[..., Family]] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class Samples:
    """A family for every metric of the catalog, without samples at first."""

    def __init__(self) -> None:
        self._families = {
            metric: _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
            for metric in catalog.ALL
        }

    def families(self) -> Iterable[Family]:
        return self._families.values()

    def add(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Add a sample of a gauge or counter; `labels` are the values of the metric's labels."""
        self._families[metric].add_metric(labels, value)  # type: ignore[attr-defined]

    def add_counts(self, metric: Metric, labels: tuple[str, ...], counts: Mapping[str, float]) -> None:
        """Add a sample for each entry, whose key is the value of the metric's last label."""
        for key, value in counts.items():
            self.add(metric, (*labels, key), value)

    def add_histogram(self, metric: Metric, labels: tuple[str, ...], value: HistogramValue) -> None:
        """Add the samples of a histogram."""
        family = self._families[metric]
        family.add_metric(labels, value.cumulative(), value.sum)  # type: ignore[attr-defined]
