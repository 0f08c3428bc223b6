"""Exposition: what a scrape returns, read by the parsers of prometheus_client."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import small_config
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.cluster.gateway.generation.generation import GenerationCall
from quire.cluster.gateway.metrics import catalog
from quire.cluster.gateway.metrics.definition import Kind
from quire.cluster.gateway.metrics.exposition import Exposition, reason_label
from quire.cluster.gateway.metrics.request_metrics import RequestMetrics
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished, Usage
from quire.cluster.text.requests.request import Request
from quire.proto import admin_pb2
from quire.proto.errors import InvalidRequest
from quire.proto.replica_status import RankStatus, ReplicaStatus
from quire.proto.sampling import SamplingParams

# Accept headers of Prometheus 2.42 and 3.5.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
CALL = GenerationCall("text", SamplingParams())


def status(**fields: Any) -> ReplicaStatus:
    numbers: dict[str, Any] = {
        "ranks": (RankStatus(0, os.getpid(), socket.gethostname(), "cpu", "idle"),),
        "num_blocks": 31, "num_used_blocks": 7, "num_cached_blocks": 5, "num_fenced_blocks": 2, "kv_use": 0.25,
        "fullest_kv_use": 0.75, "num_accepted_tokens": (7, 3),
        "num_running": 3, "num_waiting": 4, "num_preemptions": 6, "num_computed_tokens": 900, "block_size": 4,
    }  # fmt: skip
    return ReplicaStatus("replica-0", "tiny", query_id=0, **(numbers | fields))


class FakePool:
    """Pool of one replica that answers and of one that has not answered yet."""

    num_waiting = 8
    num_warmed_tokens = 16

    def __init__(self) -> None:
        self.clients = {
            "replica-0": SimpleNamespace(latest_status=status(), silence_s=0.5),
            "replica-1": SimpleNamespace(latest_status=None, silence_s=9.0),
        }

    def why_unavailable(self, replica_id: str) -> str:
        return "" if replica_id == "replica-0" else "no canary"


class FakeFleet:
    def describe(self) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(
            replicas=[admin_pb2.Replica(model="tiny", state=admin_pb2.REPLICA_STATE_READY)] * 2,
            deployments=[
                admin_pb2.DeploymentStatus(
                    model="tiny", min_replicas=1, max_replicas=4, target_replicas=3,
                    reason="12 prompt tokens wait, which take 3.0 s",
                )
            ],
            nodes=[admin_pb2.Node(draining=True), admin_pb2.Node()],
        )  # fmt: skip


@pytest.fixture
def exposition() -> Exposition:
    requests = RequestMetrics()
    watch = requests.watch(CALL)
    watch.on_accepted("tiny", Request("r", np.arange(5, dtype=np.int32), SamplingParams(max_tokens=2)))
    watch.on_event(CompletionDelta(0, "a", [1]))
    watch.on_event(CompletionDelta(0, "b", [2]))
    watch.on_event(CompletionFinished(0, "length", usage=Usage(5, 2, 0)))
    watch.on_end(None)
    requests.watch(CALL).on_end(InvalidRequest("n", "is 0"))
    model = SimpleNamespace(name="tiny", pool=FakePool(), config=small_config())
    models: Any = [model]
    return Exposition(models, requests, FakeFleet())


@pytest.mark.parametrize(
    ("accept", "parse", "content_type"),
    [
        ("", parse_text, "text/plain; version=0.0.4"),
        ("*/*", parse_text, "text/plain; version=0.0.4"),
        (PROMETHEUS_2, parse_openmetrics, "application/openmetrics-text; version=1.0.0"),
        (PROMETHEUS_3, parse_openmetrics, "application/openmetrics-text; version=1.0.0"),
    ],
)
def test_formats_are_read_by_their_parsers(
    exposition: Exposition, accept: str, parse: Callable[[str], Any], content_type: str
) -> None:
    body, answered = exposition.render(accept)
    assert answered.startswith(content_type)
    families = {family.name: family for family in parse(body.decode())}
    assert "process_resident_memory_bytes" in families
    for metric in catalog.ALL:
        family = families[metric.name]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
        for sample in family.samples:
            extra = {"le"} if sample.name.endswith("_bucket") else set()
            assert set(sample.labels) == {*metric.labels, *extra}, sample.name
            assert sample.name.startswith(metric.name)
            # As Prometheus reads it: the parsers of prometheus_client also accept other spellings.
            assert f"\n{sample.name}{{".encode() in body or f"\n{sample.name} ".encode() in body, sample.name


def test_scrape_has_the_figures_of_requests_replicas_and_fleet(exposition: Exposition) -> None:
    body, _ = exposition.render()
    values = {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }
    of_replica = ("tiny", "replica-0")
    expected = {
        ("vllm:num_requests_running", of_replica): 3,
        ("vllm:num_requests_waiting", of_replica): 4,
        ("vllm:kv_cache_usage_perc", of_replica): 0.25,
        ("quire_kv_cache_fullest_usage", of_replica): 0.75,
        ("vllm:num_preemptions_total", of_replica): 6,
        ("quire_forced_tokens_total", of_replica): 10,
        ("vllm:generation_tokens_total", ("tiny",)): 2,
        ("vllm:prompt_tokens_total", ("tiny",)): 5,
        ("vllm:request_success_total", ("tiny", "length")): 1,
        ("vllm:time_to_first_token_seconds_count", ("tiny",)): 1,
        ("vllm:inter_token_latency_seconds_count", ("tiny",)): 1,
        ("quire_request_refusals_total", ("invalid_request",)): 1,
        ("quire_computed_tokens_total", of_replica): 900,
        ("quire_kv_blocks", (*of_replica, "active")): 7,
        ("quire_kv_blocks", (*of_replica, "fenced")): 2,
        ("quire_kv_blocks", (*of_replica, "cached")): 5,
        ("quire_kv_blocks", (*of_replica, "empty")): 17,
        ("quire_replica_ready", of_replica): 1,
        ("quire_replica_ready", ("tiny", "replica-1")): 0,
        ("quire_replica_silence_seconds", ("tiny", "replica-1")): 9.0,
        ("quire_gateway_waiting_requests", ("tiny",)): 8,
        ("quire_fleet_target_replicas", ("tiny",)): 3,
        ("quire_fleet_target_reason", ("tiny", "backlog")): 1,
        ("quire_fleet_replicas", ("tiny", "ready")): 2,
        ("quire_fleet_nodes", ("draining",)): 1,
    }
    assert {key: values.get((key[0], frozenset(key[1]))) for key in expected} == expected
    assert values["quire_rank_resident_memory_bytes", frozenset((*of_replica, "0"))] > 1 << 20
    assert values["quire_rank_cpu_seconds_total", frozenset((*of_replica, "0"))] > 0
    assert ("vllm:num_requests_running", frozenset(("tiny", "replica-1"))) not in values


def test_catalog_is_unambiguous_and_documented() -> None:
    names = [metric.name for metric in catalog.ALL]
    assert len(names) == len(set(names)) > 50
    for metric in catalog.ALL:
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert not metric.name.endswith("_total"), "prometheus_client appends it"


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("no request for 60 s", "idle"),
        ("12 prompt tokens wait, which take 1.0 s", "backlog"),
        ("max_replicas is 4; 9 wanted: prompt tokens arrive at 900/s", "max_replicas"),
        ("held for up_delay_s (5 s); rows of 1.00 replicas are in use", "held"),
        ("", "other"),
    ],
)
def test_reason_label_has_no_numbers(reason: str, label: str) -> None:
    assert reason_label(reason) == label
