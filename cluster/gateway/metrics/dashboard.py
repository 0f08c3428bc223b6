"""The Grafana dashboard, as data and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import fleet_definitions, replica_definitions, request_definitions
from .definition import MODEL, REPLICA, Metric
from .expressions import Scope

WIDTH = 24  # of Grafana's grid
SCHEMA_VERSION = 39  # Grafana 10.4 and later
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCOPE = Scope("$__rate_interval", ((MODEL, "$model_name"), (REPLICA, "$engine")))

QUANTILES = (0.5, 0.9, 0.99)
STAGES = {
    "queued": request_definitions.QUEUE_TIME,
    "prefill": request_definitions.PREFILL_TIME,
    "decode": request_definitions.DECODE_TIME,
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel.

    Attributes:
        queries: legend |-> PromQL expression; a legend may have ``{{label}}`` in it.
        unit: Grafana's name of the unit.
        kind: Grafana's type of the panel.
        stacked: draw the series on top of each other.
        top: upper end of the axis; None for the data's.
    """

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels, which are laid out from left to right."""

    title: str
    panels: list[Panel] = field(default_factory=list)


def _quantiles(title: str, metric: Metric) -> Panel:
    queries = {f"p{100 * share:g}": _SCOPE.quantile(share, metric) for share in QUANTILES}
    return Panel(title, metric.help, queries, metric.unit)


def _total(title: str, metric: Metric, *by: str, unit: str = "", **style: Any) -> Panel:
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or title.lower()
    return Panel(title, metric.help, {legend: _SCOPE.total(metric, *by)}, unit or metric.unit, **style)


def _per_replica(title: str, metric: Metric, *by: str, unit: str = "", **style: Any) -> Panel:
    legend = " ".join(f"{{{{{label}}}}}" for label in (REPLICA, *by))
    return Panel(title, metric.help, {legend: _SCOPE.per_replica(metric, *by)}, unit or metric.unit, **style)


def _figure(title: str, description: str, expression: str, unit: str = "short") -> Panel:
    return Panel(title, description, {title: expression}, unit, kind="stat", width=3, height=4)


def _overview() -> Row:
    scope = _SCOPE
    return Row(
        "Now",
        [
            _figure(
                "Ready replicas",
                replica_definitions.REPLICA_READY.help,
                scope.total(replica_definitions.REPLICA_READY),
            ),
            _figure(
                "Running",
                replica_definitions.REQUESTS_RUNNING.help,
                scope.total(replica_definitions.REQUESTS_RUNNING),
            ),
            _figure(
                "Waiting",
                replica_definitions.REQUESTS_WAITING.help,
                scope.total(replica_definitions.REQUESTS_WAITING),
            ),
            _figure(
                "Generated tokens/s",
                request_definitions.GENERATION_TOKENS.help,
                scope.total(request_definitions.GENERATION_TOKENS),
            ),
            _figure(
                "First token, p99",
                request_definitions.TIME_TO_FIRST_TOKEN.help,
                scope.quantile(0.99, request_definitions.TIME_TO_FIRST_TOKEN),
                "s",
            ),
            _figure(
                "Between tokens, p99",
                request_definitions.INTER_TOKEN_LATENCY.help,
                scope.quantile(0.99, request_definitions.INTER_TOKEN_LATENCY),
                "s",
            ),
            _figure(
                "KV in use",
                replica_definitions.KV_USAGE.help,
                f"avg({scope.per_replica(replica_definitions.KV_USAGE)})",
                "percentunit",
            ),
            _figure(
                "Prefix cache hits",
                replica_definitions.PREFIX_HITS.help,
                scope.prefix_hit_rate(),
                "percentunit",
            ),
        ],
    )


def _latency() -> Row:
    stages = {name: _SCOPE.mean(metric) for name, metric in STAGES.items()}
    return Row(
        "Latency",
        [
            _quantiles("Time to first token", request_definitions.TIME_TO_FIRST_TOKEN),
            _quantiles("Time between tokens", request_definitions.INTER_TOKEN_LATENCY),
            _quantiles("Time to the last token", request_definitions.E2E_LATENCY),
            Panel(
                "Where the time goes",
                "Mean time of a completion by stage.",
                stages,
                "s",
                width=12,
                stacked=True,
            ),
            _per_replica("Oldest waiting request", replica_definitions.OLDEST_WAIT, width=12),
        ],
    )


def _traffic() -> Row:
    tokens = {
        "generated": _SCOPE.total(request_definitions.GENERATION_TOKENS),
        "prompt": _SCOPE.total(request_definitions.PROMPT_TOKENS),
        "prompt, from the cache": _SCOPE.total(request_definitions.CACHED_PROMPT_TOKENS),
        "computed again": _SCOPE.total(request_definitions.RECOMPUTED_TOKENS),
    }
    return Row(
        "Traffic",
        [
            Panel("Tokens per second", "Tokens of requests, by kind.", tokens),
            _total(
                "Completions",
                request_definitions.REQUEST_SUCCESS,
                "finished_reason",
                unit="reqps",
                stacked=True,
            ),
            _total("Refusals", request_definitions.REFUSALS, "reason", unit="reqps", stacked=True),
            _total("Errors", request_definitions.ERRORS, MODEL, "reason", unit="reqps", stacked=True),
            _total(
                "Sequences that left a replica", request_definitions.MOVES, "cause", unit="ops", stacked=True
            ),
            _total("Completions that survived a failure", request_definitions.RECOVERIES, MODEL, unit="ops"),
        ],
    )


def _scheduler() -> Row:
    sequences = {
        "{{engine}} running": _SCOPE.per_replica(replica_definitions.REQUESTS_RUNNING),
        "{{engine}} waiting": _SCOPE.per_replica(replica_definitions.REQUESTS_WAITING),
    }
    return Row(
        "Scheduler and KV cache",
        [
            Panel("Sequences", "Sequences with and without a row.", sequences, width=6),
            _total("KV blocks", replica_definitions.KV_BLOCKS, "state", width=6, stacked=True),
            Panel(
                "Prefix cache hits",
                replica_definitions.PREFIX_HITS.help,
                {"found": _SCOPE.prefix_hit_rate()},
                "percentunit",
                width=6,
                top=1.0,
            ),
            _per_replica("Preemptions", replica_definitions.PREEMPTIONS, unit="ops", width=6),
            _per_replica(
                "Busy share", replica_definitions.STEP_SECONDS, unit="percentunit", width=6, top=1.0
            ),
            _per_replica("Steps", replica_definitions.STEPS, unit="ops", width=6),
            Panel(
                "Mean wait for a plan",
                replica_definitions.PLAN_WAIT_SECONDS.help,
                {"{{engine}}": _SCOPE.mean_plan_wait()},
                "s",
                width=6,
            ),
            _per_replica("Prompt tokens in the queue", replica_definitions.QUEUED_TOKENS, width=6),
            _total("Blocks of host memory", replica_definitions.HOST_BLOCKS, "state", width=6, stacked=True),
            _total("Slots for states", replica_definitions.STATE_SLOTS, "state", width=6, stacked=True),
            _total("Encoder outputs", replica_definitions.ENCODER_BYTES, "state", width=6, stacked=True),
            _per_replica("Images with encoder outputs", replica_definitions.ENCODER_OUTPUTS, width=6),
            _per_replica("Encoded images", replica_definitions.ENCODED_IMAGES, unit="ops", width=6),
            _per_replica("Tensors of images", replica_definitions.IMAGE_TENSOR_BYTES, unit="bytes", width=6),
            _per_replica("Swapped blocks", replica_definitions.SWAPPED_BLOCKS, unit="ops", width=6),
            _total("Blocks in files", replica_definitions.STORED_BLOCKS, "tier", width=6, stacked=True),
            _per_replica("Tokens found in files", replica_definitions.STORED_HITS, unit="ops", width=6),
            _per_replica("Computed tokens", replica_definitions.COMPUTED_TOKENS, unit="ops", width=6),
            _per_replica("KV fragmentation", replica_definitions.KV_FRAGMENTATION, width=6),
            _per_replica("KV held for other replicas", replica_definitions.KV_LEASES, width=6),
            _per_replica("KV read from replicas", replica_definitions.KV_PULLED_BYTES, unit="Bps", width=6),
            _total("KV not read", replica_definitions.KV_PULL_FAILURES, "reason", unit="ops", width=6),
            _per_replica("Kernel compilations", replica_definitions.COMPILATIONS, unit="ops", width=6),
        ],
    )


def _fleet() -> Row:
    replicas = {
        "target": f"max by ({MODEL}) ({_SCOPE.select(fleet_definitions.TARGET)})",
        "ready": _SCOPE.total(replica_definitions.REPLICA_READY, MODEL),
    }
    reasons = {"{{reason}}": f"max by ({MODEL}, reason) ({_SCOPE.select(fleet_definitions.REASON)})"}
    states = {"{{state}}": f"max by ({MODEL}, state) ({_SCOPE.select(fleet_definitions.REPLICAS)})"}
    return Row(
        "Fleet",
        [
            Panel("Replicas, wanted and ready", fleet_definitions.TARGET.help, replicas, width=6),
            Panel("Why that many", fleet_definitions.REASON.help, reasons, width=6, stacked=True),
            Panel("Replicas by state", fleet_definitions.REPLICAS.help, states, width=6, stacked=True),
            _total("Requests without a replica", request_definitions.UNPLACED_REQUESTS, MODEL, width=6),
            _per_replica("Silence of replicas", replica_definitions.REPLICA_SILENCE),
            _per_replica("Memory of ranks", replica_definitions.RANK_MEMORY, "rank"),
            _per_replica("CPU of ranks", replica_definitions.RANK_CPU, "rank", unit="short"),
        ],
    )


def rows() -> list[Row]:
    """Return the dashboard's content."""
    return [_overview(), _latency(), _traffic(), _scheduler(), _fleet()]


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": []}
            | {"gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        y += 1
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + line_height
            position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            panels.append({"id": len(panels) + 1, "gridPos": position} | _panel_model(panel))
            x, line_height = x + panel.width, panel.height
        y += line_height
    return {
        "uid": "quire",
        "title": "quire",
        "description": "Generated by python -m quire.cluster.gateway.metrics.generate; do not edit.",
        "tags": ["llm", "quire"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _panel_model(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            | {"datasource": _DATASOURCE, "editorMode": "code", "range": True}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _STAT_OPTIONS if panel.kind == "stat" else _GRAPH_OPTIONS,
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        mode = "normal" if panel.stacked else "none"
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": mode, "group": "A"},
        }
    return defaults


_GRAPH_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_STAT_OPTIONS = {
    "colorMode": "none",
    "graphMode": "area",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "textMode": "value",
}


def _variables() -> list[dict[str, Any]]:
    """Return the variables: the data source, the models and the replicas to show."""
    ready = replica_definitions.REPLICA_READY.sample_name
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _label_variable(MODEL, "Model", f"label_values({ready}, {MODEL})"),
        _label_variable(REPLICA, "Replica", f'label_values({ready}{{{MODEL}=~"${MODEL}"}}, {REPLICA})'),
    ]


def _label_variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }
