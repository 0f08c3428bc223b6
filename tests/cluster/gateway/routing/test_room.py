"""Calls that are refused before their parameters are read, since replicas have just refused another one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from narrowing import instance_of
from serving import ENDLESS, PROMPT, ServerFactory, eventually, first_delta, run

from quire.cluster.client.async_client import AsyncClient
from quire.cluster.config.tenants import TenantOptions, Tenants
from quire.cluster.gateway.generation.generation import CallHead, GenerationCall, GenerationService
from quire.cluster.gateway.http.server import HttpServer
from quire.cluster.gateway.metrics.request_metrics import RequestMetrics
from quire.cluster.os_utils.watched_file import constant
from quire.cluster.text.requests.received import Received
from quire.proto.errors import Overloaded, QuotaExceeded
from quire.proto.sampling import SamplingParams
from quire.scheduler.core.admission import forecast

SAMPLING = SamplingParams(temperature=0.0, max_tokens=24)


class FullPool:
    """A pool without room, whose model cannot check requests.

    Attributes:
        asked: tenant, priority and deadline of each question.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, float | None]] = []

    def check_room(self, tenant: str, priority: int, timeout_s: float | None) -> None:
        self.asked.append((tenant, priority, timeout_s))
        raise Overloaded("full", retry_after_s=2.0)


def make_service(tenants: Tenants | None = None) -> tuple[GenerationService, FullPool, RequestMetrics]:
    pool, metrics = FullPool(), RequestMetrics()
    models: Any = SimpleNamespace(find=lambda name: SimpleNamespace(pool=pool))
    return GenerationService(models, metrics, constant(tenants or Tenants())), pool, metrics


def head(request_id: str = "") -> CallHead:
    return CallHead("", request_id, "acme", 3, 1.5, {})


def test_call_without_room_is_refused_and_counted() -> None:
    service, pool, metrics = make_service()
    with pytest.raises(Overloaded) as caught:
        service.check_room(head())
    assert caught.value.retry_after_s == 2.0
    assert pool.asked == [("acme", 3, 1.5)]
    assert metrics.refusals == {"overloaded": 1}


def test_call_that_may_repeat_another_is_not_refused_early() -> None:
    service, pool, _ = make_service()
    service.check_room(head("mine"))
    assert pool.asked == []


def test_quota_goes_before_room() -> None:
    limits = Tenants(TenantOptions(requests_per_minute=1.0))
    service, _, metrics = make_service(limits)
    with pytest.raises(Overloaded):
        service.check_room(head())
    with pytest.raises(QuotaExceeded):
        service.check_room(head())
    assert metrics.refusals == {"overloaded": 1, "quota_exceeded": 1}


async def start(service: GenerationService, call: GenerationCall) -> None:
    async with service.run(call):
        raise AssertionError("the request was accepted")


def test_call_of_any_server_is_refused_before_its_check() -> None:
    service, _, metrics = make_service()
    with pytest.raises(Overloaded):
        asyncio.run(start(service, GenerationCall("text", SAMPLING)))
    assert metrics.refusals == {"overloaded": 1}


def test_call_that_began_at_another_gateway_is_not_refused() -> None:
    service, pool, _ = make_service()
    call = GenerationCall(
        "text", SAMPLING, request_id="r", is_resumable=True, after_event=0, received=Received()
    )
    with pytest.raises(AttributeError):  # the model of this test has no checker
        asyncio.run(start(service, call))
    assert pool.asked == []


def test_gateway_repeats_a_refusal_until_a_sequence_ends(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "MAX_HOLD_S", 3600.0)
    monkeypatch.setattr(forecast, "HOLD_SHARE", 1e9)

    async def scenario() -> None:
        async with (
            serve(http=True, max_num_seqs=1, max_queue_len=1) as server,
            AsyncClient(server.target) as client,
            httpx.AsyncClient(base_url=instance_of(HttpServer, server.http).url) as http,
        ):
            server.brake.slow_down()
            first = client.generate_stream(PROMPT, ENDLESS)
            await first_delta(first)
            second = asyncio.ensure_future(client.generate(PROMPT, SAMPLING))

            async def is_waiting() -> bool:
                return server.replica.num_running == 2

            await eventually(is_waiting)
            with pytest.raises(Overloaded, match=r"^1 requests are waiting already"):
                await client.generate(PROMPT, SAMPLING)
            with pytest.raises(Overloaded, match=r"^refused by the gateway") as caught:
                await client.generate(PROMPT, SAMPLING)
            assert caught.value.retry_after_s is not None
            # The body is not validated.
            response = await http.post("/v1/completions", json={"max_tokens": "many"}, timeout=60)
            assert response.status_code == 503
            assert response.json()["error"]["message"].startswith("refused by the gateway")
            await first.aclose()
            server.brake.speed_up()
            await second
            await client.generate(PROMPT, SAMPLING)
            response = await http.post("/v1/completions", json={"max_tokens": "many"}, timeout=60)
            assert response.status_code == 400

    run(scenario())
