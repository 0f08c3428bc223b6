"""The dashboard, the alert rules and docs/metrics.md: up to date, consistent, and read by Prometheus' own parsers."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from quire.cluster.gateway.metrics import catalog, replica_definitions, request_definitions
from quire.cluster.gateway.metrics.alerts import alerts
from quire.cluster.gateway.metrics.dashboard import WIDTH, dashboard
from quire.cluster.gateway.metrics.expressions import Scope
from quire.cluster.gateway.metrics.generate import generated_files

ROOT = Path(__file__).parents[4]
# Drawn nowhere: labels only, or the parts of another panel.
NOT_DRAWN = {
    "vllm:cache_config_info", "quire_rank_info", "quire_replica_uptime_seconds", "quire_replica_draining",
    "quire_kv_tokens", "vllm:request_inference_time_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_n",
    "vllm:request_params_max_tokens", "quire_request_preempted_seconds", "quire_gateway_open_requests",
    "quire_fleet_min_replicas", "quire_fleet_max_replicas", "quire_fleet_state_stale", "quire_fleet_nodes",
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos", "quire_recovery_kept_tokens",
    "quire_forced_tokens", "quire_kv_offers", "quire_kv_pulls", "quire_kv_pulled_tokens",
    "quire_kv_recomputed_tokens", "quire_kv_ahead_tokens", "quire_split_prompts", "quire_kv_pull_rate",
    "quire_replica_role", "quire_gateway_warmed_tokens",
    "quire_stored_kv_bytes", "quire_stored_kv_reads", "quire_stored_kv_writes",
    "quire_stored_kv_corrupt", "quire_stored_kv_failed_reads", "quire_stored_kv_late_reads",
}  # fmt: skip


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Every expression of the dashboard and of the rules, without Grafana's variables."""
    drawn = [target["expr"] for panel in panels() for target in panel["targets"]]
    resolved = [
        re.sub(r"\$(model_name|engine)", ".*", each.replace("$__rate_interval", "5m")) for each in drawn
    ]
    return resolved + [alert.expression for alert in alerts()]


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics that an expression reads, without the suffixes of their samples."""
    names = re.findall(r"\b(?:vllm:|quire_)\w+", expression)
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}


def test_generated_files_are_up_to_date() -> None:
    for name, content in generated_files().items():
        assert (ROOT / name).read_text() == content, f"{name}: run make metrics"


@pytest.mark.parametrize("expression", expressions())
def test_expressions_parse_and_read_defined_metrics(expression: str) -> None:
    promql_parser.parse(expression)
    assert metrics_in(expression) <= {metric.name for metric in catalog.ALL}


def test_every_metric_is_drawn_or_left_out_on_purpose() -> None:
    drawn = set().union(*(metrics_in(each) for each in expressions()))
    assert {metric.name for metric in catalog.ALL} - drawn - NOT_DRAWN == set()


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        area = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & area, f"{panel['title']} overlaps"
        cells |= area
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert all(earlier < later for earlier, later in pairwise(ids))


def test_replicas_are_counted_once_although_every_gateway_reports_them() -> None:
    scope = Scope("1m")
    assert scope.total(replica_definitions.REQUESTS_RUNNING) == (
        "sum(max by (model_name, engine) (vllm:num_requests_running))"
    )
    assert scope.total(request_definitions.GENERATION_TOKENS) == "sum(rate(vllm:generation_tokens_total[1m]))"


def test_alert_names_are_unique_and_their_labels_exist() -> None:
    names = [alert.name for alert in alerts()]
    assert len(names) == len(set(names))
    for alert in alerts():
        labels = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
        assert all(re.search(rf"by \([^)]*\b{label}\b", alert.expression) for label in labels), alert.name


def test_page_lists_every_metric_and_alert() -> None:
    page = generated_files()["docs/metrics.md"]
    for metric in catalog.ALL:
        assert f"| `{metric.sample_name}` | {metric.kind.value} |" in page
    for alert in alerts():
        assert f"| {alert.name} |" in page


SCENARIO = {
    "rule_files": ["alerts.yaml"],
    "evaluation_interval": "30s",
    "tests": [
        {
            "interval": "30s",
            "input_series": [
                # Two gateways report the same replica, which stops making steps at 10 minutes.
                {
                    "series": f'vllm:num_requests_running{{model_name="m",engine="r",instance="{gateway}"}}',
                    "values": "3x80",
                }
                for gateway in "ab"
            ]
            + [
                {"series": 'quire_steps_total{model_name="m",engine="r",instance="a"}', "values": "0+10x20 200x60"},
                {"series": 'quire_replica_ready{model_name="m",engine="r"}', "values": "1x80"},
                {"series": 'quire_request_moves_total{model_name="m",cause="failure"}', "values": "0x20 1x60"},
                {"series": 'vllm:request_success_total{model_name="m",finished_reason="stop"}', "values": "0+9x80"},
                {"series": 'vllm:request_success_total{model_name="m",finished_reason="error"}', "values": "0+1x80"},
            ],
            "alert_rule_test": [
                {"eval_time": "8m", "alertname": "QuireReplicaStalled", "exp_alerts": []},
                {"eval_time": "20m", "alertname": "QuireNoReadyReplica", "exp_alerts": []},
                {"eval_time": "8m", "alertname": "QuireReplicaLost", "exp_alerts": []},
            ],
        }
    ],
}  # fmt: skip


def fired(eval_time: str, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """A test of promtool: the alert fires; its texts are those of the rule."""
    alert = next(each for each in alerts() if each.name == name)
    values = {"engine": "r", "model_name": "m"}
    summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: values[match[1]], alert.summary)
    summary = summary.replace("{{ $value | humanizePercentage }}", "10%")
    expected = {
        "exp_labels": labels | {"severity": alert.severity},
        "exp_annotations": {"summary": summary, "description": alert.description},
    }
    return {"eval_time": eval_time, "alertname": name, "exp_alerts": [expected]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_rules_and_alerts_fire(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(generated_files()["examples/monitoring/alerts.yaml"])
    scenario: Any = SCENARIO
    scenario["tests"][0]["alert_rule_test"] += [
        fired("19m", "QuireReplicaStalled", {"engine": "r", "model_name": "m"}),
        fired("12m", "QuireReplicaLost", {"model_name": "m"}),
        fired("12m", "QuireRequestsFail", {"model_name": "m"}),
    ]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(scenario))
    recording = {"groups": [{"name": "panels", "rules": [
        {"record": f"panel:{index}", "expr": expression} for index, expression in enumerate(expressions())
    ]}]}  # fmt: skip
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump(recording))
    for command in (["check", "rules", "alerts.yaml", "panels.yaml"], ["test", "rules", "test.yaml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
