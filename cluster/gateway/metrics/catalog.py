"""Every metric of a gateway.

Names that begin with ``vllm:`` mean the same as in vLLM, so that its dashboards, scalers and gateways work.
``engine`` is the id of a replica. Labels are model names, replica ids, ranks and fixed words: no metric has a label
for requests, tenants or texts.
"""

from __future__ import annotations

from types import ModuleType

from . import fleet_definitions, replica_definitions, request_definitions
from .definition import Metric


def _metrics_of(module: ModuleType) -> tuple[Metric, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Metric))


GROUPS: dict[str, tuple[Metric, ...]] = {
    "Replicas": _metrics_of(replica_definitions),
    "Requests": _metrics_of(request_definitions),
    "Fleet": _metrics_of(fleet_definitions),
}
ALL: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)
