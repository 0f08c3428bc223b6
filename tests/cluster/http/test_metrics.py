"""/metrics over HTTP, after real requests."""

from __future__ import annotations

import httpx
from local_server import ThreadedServer
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.cluster.client.client import Client
from quire.proto.sampling import SamplingParams


def value(body: str, name: str) -> float:
    return sum(each.value for family in parse_text(body) for each in family.samples if each.name == name)


def test_metrics_count_real_requests(http: httpx.Client, server: ThreadedServer) -> None:
    before = http.get("/metrics").text
    with Client(server.server.target) as client:
        for prompt in ("one", "two"):
            client.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    server.run(server.server.replica.status(60.0))  # the next one is due in 0.1 s
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    for name, growth in (
        ("vllm:generation_tokens_total", 12),
        ("vllm:request_success_total", 2),
        ("vllm:time_to_first_token_seconds_count", 2),
        ("quire_request_refusals_total", 0),
    ):
        assert value(response.text, name) - value(before, name) == growth, name
    assert value(response.text, "quire_steps_total") > 0
    assert value(response.text, "quire_replica_ready") == 1


def test_metrics_in_openmetrics_end_with_eof(http: httpx.Client) -> None:
    response = http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert list(parse_openmetrics(response.text))  # type: ignore[no-untyped-call]
