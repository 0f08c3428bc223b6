"""/metrics over HTTP, after real requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer, threaded_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.cluster.client.client import Client
from quire.cluster.client.wire.tokens import Role, Token, TokenSet
from quire.cluster.config.tenants import TenantOptions, Tenants
from quire.cluster.gateway.access.security import Security
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import InvalidRequest, ModelNotFound, PermissionDenied, Unauthenticated
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


def refusals(server: ThreadedServer) -> Counter[str]:
    return server.server.services.monitor.requests.refusals.copy()


def test_calls_that_no_endpoint_runs_are_counted_as_refusals(
    http: httpx.Client, server: ThreadedServer
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "x", "max_tokens": "many"}, "invalid_request"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "invalid_request"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, "model_not_found"),
        ("/v1/chat/completions", {**chat, "top_p": 2}, "invalid_request"),
        ("/v1/messages", {**chat, "max_tokens": 0}, "invalid_request"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_x"}, "invalid_request"),
        ("/tokenize", {}, "invalid_request"),
    ]
    for path, body, reason in calls:
        before = refusals(server)
        assert http.post(path, json=body).status_code in (400, 404)
        assert refusals(server) - before == Counter({reason: 1}), path
    for content in (b"{", b"[" + 200_000 * b'"",'):
        before = refusals(server)
        headers = {"content-type": "application/json"}
        assert http.post("/v1/completions", content=content, headers=headers).status_code == 400
        assert refusals(server) - before == Counter({"invalid_request": 1})
    with Client(server.server.target) as client:
        before = refusals(server)
        for prompt, model in (("x", "other"), ([10**6], "")):
            with pytest.raises((ModelNotFound, InvalidRequest)):
                client.generate(prompt, SamplingParams(), model=model)
        assert refusals(server) - before == Counter({"model_not_found": 1, "invalid_request": 1})


def test_calls_without_a_token_or_above_a_limit_are_counted_as_refusals(
    make_model: Callable[..., Path],
) -> None:
    tokens = TokenSet([Token.of("sesame", "gold"), Token.of("gauge", roles=frozenset({Role.METRICS}))])
    tenants = Tenants(TenantOptions(), {"gold": TenantOptions(requests_per_minute=1)})
    security = Security(tokens=constant(tokens), tenants=constant(tenants))
    with (
        threaded_server(make_model("llama"), security=security) as server,
        httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http,
    ):
        assert http.post("/v1/completions", headers={"x-api-key": "guess"}).status_code == 401
        assert http.post("/v1/completions", headers={"x-api-key": "gauge"}).status_code == 403
        for token, error in (("guess", Unauthenticated), ("gauge", PermissionDenied)):
            with Client(server.server.target, token=token) as client, pytest.raises(error):
                client.models()
        call = {"prompt": "x", "max_tokens": 1}
        first, second = (
            http.post("/v1/completions", json=call, headers={"x-api-key": "sesame"}) for _ in "12"
        )
        assert (first.status_code, second.status_code) == (200, 429)
        assert 0 < int(second.headers["retry-after"]) <= 60
        metrics = http.get("/metrics", headers={"x-api-key": "gauge"}).text
        assert 'quire_request_refusals_total{reason="quota_exceeded"} 1' in metrics
        for reason in ("unauthenticated", "permission_denied"):
            assert f'quire_request_refusals_total{{reason="{reason}"}} 2' in metrics


def test_metrics_in_openmetrics_end_with_eof(http: httpx.Client) -> None:
    response = http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert list(parse_openmetrics(response.text))  # type: ignore[no-untyped-call]
