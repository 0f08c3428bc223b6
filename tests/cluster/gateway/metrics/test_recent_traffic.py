"""RecentTraffic and the line that is written to the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.client.wire.status import LatencyInfo, TrafficInfo
from quire.cluster.gateway.metrics import request_definitions
from quire.cluster.gateway.metrics.recent_traffic import (
    INTERVAL_S,
    NUM_SAMPLES,
    RecentTraffic,
    TrafficLog,
    describe,
)
from quire.cluster.gateway.metrics.request_metrics import RequestMetrics


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def advance(recent: RecentTraffic, requests: RequestMetrics, clock: Clock, num_tokens: int) -> None:
    """Sample after one more second, with one more completion."""
    model = requests.models["tiny"]
    clock.now += 1.0
    model.num_generated_tokens += num_tokens
    model.num_prompt_tokens += 2 * num_tokens
    model.finished["stop"] += 1
    model.histograms[request_definitions.TIME_TO_FIRST_TOKEN].observe(0.004)
    recent.sample()


@pytest.fixture
def requests() -> RequestMetrics:
    return RequestMetrics()


def test_traffic_is_over_the_window(requests: RequestMetrics) -> None:
    clock = Clock()
    recent = RecentTraffic(requests, clock)
    assert recent.of("tiny") == TrafficInfo("tiny")
    for num_tokens in (100, 10, 20, 30):
        advance(recent, requests, clock, num_tokens)
    assert recent.generated_tokens_per_s("tiny") == [10.0, 20.0, 30.0]
    traffic = recent.of("tiny", 2)
    assert (traffic.seconds, traffic.generated_tokens_per_s, traffic.prompt_tokens_per_s) == (2.0, 25.0, 50.0)
    assert (traffic.completions_per_s, traffic.errors_per_s) == (1.0, 0.0)
    assert traffic.first_token.p50_s == pytest.approx(0.004)
    assert traffic.inter_token == LatencyInfo()


def test_traffic_of_more_than_a_minute_ago_is_forgotten(requests: RequestMetrics) -> None:
    clock = Clock()
    recent = RecentTraffic(requests, clock)
    for _ in range(2 * NUM_SAMPLES):
        advance(recent, requests, clock, 1)
    assert len(recent.generated_tokens_per_s("tiny")) == NUM_SAMPLES - 1
    assert recent.of("tiny").seconds == NUM_SAMPLES - 1


def test_log_line_names_throughput_load_and_latencies() -> None:
    traffic = TrafficInfo(
        "tiny",
        10.0,
        3,
        0,
        2000.0,
        1234.5,
        1.0,
        0.2,
        first_token=LatencyInfo(0.05, 0.2),
        inter_token=LatencyInfo(0.01, 0.02),
    )
    status: Any = SimpleNamespace(
        num_running=3, num_waiting=1, num_blocks=100, num_used_blocks=25, prefix_query_tokens=10, prefix_hit_tokens=4
    )  # fmt: skip
    assert describe(traffic, [status, status]) == (
        "1,234 generated and 2,000 prompt tokens/s, 6 running, 2 waiting, KV 25%, prefix hits 40%, "
        "first token p50 50 ms p99 200 ms, between tokens p50 10 ms p99 20 ms, 2 errors"
    )


def test_log_is_quiet_without_requests(requests: RequestMetrics, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    recent = RecentTraffic(requests, clock)
    models: Any = [SimpleNamespace(name="tiny", pool=SimpleNamespace(clients={}))]
    log = TrafficLog(models, recent)
    caplog.set_level(logging.INFO, "quire")
    requests.add_model("tiny")
    recent.sample()
    advance(recent, requests, clock, 7)
    log.write()
    (record,) = caplog.records
    assert record.getMessage().startswith("tiny: 7 generated and 14 prompt tokens/s")
    for _ in range(INTERVAL_S + 1):
        clock.now += 1.0
        recent.sample()
    caplog.clear()
    log.write()
    assert not caplog.records
