"""PromQL over the metrics of the catalog.

Every gateway of a fleet exposes the status of every replica, so gauges and rates of replicas are reduced with ``max``
per replica before they are added up. Metrics of requests are each gateway's own, and are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import replica_definitions
from .definition import MODEL, REPLICA, Kind, Metric


@dataclass(frozen=True, slots=True)
class Scope:
    """Series that are read, and the time over which rates are taken.

    Attributes:
        matchers: label matchers by metric label; those of labels that a metric lacks are left out.
    """

    window: str
    matchers: tuple[tuple[str, str], ...] = ()

    def select(self, metric: Metric, name: str = "", **equal: str) -> str:
        """Return the selector of a metric's samples.

        Args:
            name: name of the samples, if it is not `sample_name`.
            equal: further labels and their values.
        """
        matchers = [f'{label}=~"{value}"' for label, value in self.matchers if label in metric.labels]
        matchers += [f'{label}="{value}"' for label, value in equal.items()]
        name = name or metric.sample_name
        return f"{name}{{{', '.join(matchers)}}}" if matchers else name

    def rate(self, metric: Metric, name: str = "", **equal: str) -> str:
        """Return the increase per second of a counter."""
        return f"rate({self.select(metric, name, **equal)}[{self.window}])"

    def per_replica(self, metric: Metric, *by: str, **equal: str) -> str:
        """Return a replica's gauge, or its counter's rate, once for each replica and value of `by`."""
        assert REPLICA in metric.labels, f"{metric.name} is not a replica's"
        value = self.rate(metric, **equal) if metric.kind is Kind.COUNTER else self.select(metric, **equal)
        return f"max by ({', '.join((MODEL, REPLICA, *by))}) ({value})"

    def total(self, metric: Metric, *by: str, **equal: str) -> str:
        """Return the sum over replicas and gateways: of a gauge, or of a counter's rate."""
        if REPLICA in metric.labels:
            inner = self.per_replica(metric, *(label for label in by if label != MODEL), **equal)
        elif metric.kind is Kind.COUNTER:
            inner = self.rate(metric, **equal)
        else:
            inner = self.select(metric, **equal)
        return f"sum by ({', '.join(by)}) ({inner})" if by else f"sum({inner})"

    def quantile(self, share: float, metric: Metric) -> str:
        """Return a quantile of a histogram over the window."""
        buckets = self.rate(metric, f"{metric.name}_bucket")
        return f"histogram_quantile({share:g}, sum by (le) ({buckets}))"

    def mean(self, metric: Metric) -> str:
        """Return the mean of a histogram over the window."""
        total, count = (self.rate(metric, f"{metric.name}_{part}") for part in ("sum", "count"))
        return f"sum({total}) / sum({count})"

    def prefix_hit_rate(self) -> str:
        return f"{self.total(replica_definitions.PREFIX_HITS)} / {self.total(replica_definitions.PREFIX_QUERIES)}"

    def mean_plan_wait(self) -> str:
        """Return the mean time that ranks wait for a plan, per replica."""
        waits = self.per_replica(replica_definitions.PLAN_WAITS)
        return f"{self.per_replica(replica_definitions.PLAN_WAIT_SECONDS)} / {waits}"
