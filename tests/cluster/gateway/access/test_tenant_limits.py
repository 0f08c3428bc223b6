"""Limits of tenants: what is admitted, what is refused, and when a refused request may come back."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import PROMPT, ServerFactory, first_delta

from quire.cluster.client.client import AsyncClient
from quire.cluster.config.tenants import TenantOptions, Tenants
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.access.tenant_limits import MAX_IDLE_TENANTS, TenantLimiter
from quire.cluster.os_utils.watched_file import constant
from quire.cluster.text.requests.outputs import CompletionDelta
from quire.cluster.text.requests.request import Request
from quire.proto.errors import QuotaExceeded
from quire.proto.sampling import SamplingParams


class Limited:
    """A limiter of all tenants with a clock of the test's own."""

    def __init__(self, **limits: float) -> None:
        self.now, self.tenants = 1000.0, Tenants(TenantOptions(**limits))  # type: ignore[arg-type]
        self.limiter = TenantLimiter(lambda: self.tenants, clock=lambda: self.now)

    def run(
        self, num_prompt_tokens: int = 1, num_output_tokens: int = 0, tenant: str = "gold", **sampling: int
    ) -> None:
        """Run a request that takes no time."""
        with self.limiter.admit(tenant) as admission:
            prompt = np.ones(num_prompt_tokens, dtype=np.int32)
            admission.accept(Request("id", prompt, SamplingParams(**sampling)))  # type: ignore[arg-type]
            admission.charge(CompletionDelta(0, "", [1] * num_output_tokens))

    def refusal(self, tenant: str = "gold") -> QuotaExceeded:
        with pytest.raises(QuotaExceeded) as caught, self.limiter.admit(tenant):
            pass
        return caught.value


def test_tenant_without_limits_is_always_admitted() -> None:
    limited = Limited()
    for _ in range(100):
        limited.run(10_000)


def test_requests_at_once_are_limited_per_tenant() -> None:
    limited = Limited(max_concurrent_requests=2)
    with ExitStack() as running:
        running.enter_context(limited.limiter.admit("gold"))
        running.enter_context(limited.limiter.admit("gold"))
        error = limited.refusal()
        assert (error.tenant, error.quota, error.limit, error.retry_after_s) == (
            "gold",
            "concurrent_requests",
            2,
            None,
        )
        limited.run(tenant="tin")
        limited.now += 8
    with limited.limiter.admit("gold"), limited.limiter.admit("gold"):
        # Two requests took 8 s each: of two, one ends every 4 s.
        assert limited.refusal().retry_after_s == pytest.approx(4)
    limited.run()


def test_request_that_fails_is_no_longer_counted() -> None:
    limited = Limited(max_concurrent_requests=1)
    with pytest.raises(RuntimeError), limited.limiter.admit("gold"):
        raise RuntimeError
    limited.run()


def test_requests_per_minute_refill_evenly() -> None:
    limited = Limited(requests_per_minute=6)
    for _ in range(6):
        limited.run()
    error = limited.refusal()
    assert (error.quota, error.limit) == ("requests_per_minute", 6)
    assert error.retry_after_s == pytest.approx(10)
    limited.run(tenant="tin")
    limited.now += 10
    limited.run()
    assert limited.refusal().retry_after_s == pytest.approx(10)


def test_refused_request_uses_nothing() -> None:
    limited = Limited(requests_per_minute=1)
    limited.run()
    for _ in range(100):
        limited.refusal()
    limited.now += 60
    limited.run()


def test_prompt_and_output_tokens_are_charged_and_a_debt_is_waited_off() -> None:
    limited = Limited(tokens_per_minute=60)
    limited.run(num_prompt_tokens=50, num_output_tokens=40)
    error = limited.refusal()
    assert (error.quota, error.limit) == ("tokens_per_minute", 60)
    assert error.retry_after_s == pytest.approx(31)  # of 30 owed tokens and one to begin with
    limited.now += 31
    limited.run(num_prompt_tokens=1)


def test_tokens_of_dropped_outputs_are_charged() -> None:
    limited = Limited(tokens_per_minute=60)
    limited.run(1, 10, n=2, best_of=8)
    assert limited.limiter._uses["gold"].tokens.used == 1 + 4 * 10
    limited.run(1, 10, beam_width=4)
    assert limited.limiter._uses["gold"].tokens.used == 2 + 4 * 10 + 4 * 10


@given(
    limit=st.floats(0.01, 1e6),
    used=st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), max_size=20),
)
def test_request_is_admitted_after_the_stated_delay(limit: float, used: list[tuple[int, float]]) -> None:
    limited = Limited(requests_per_minute=limit, tokens_per_minute=limit)
    for num_tokens, pause_s in used:
        limited.now += pause_s
        for _ in range(3):  # each limit may have a delay of its own
            try:
                limited.run(num_tokens)
                break
            except QuotaExceeded as error:
                limited.now += error.retry_after_s or math.nan
        else:
            pytest.fail("refused after the stated delays")


def test_limit_that_is_set_later_begins_full() -> None:
    limited = Limited()
    for _ in range(100):
        limited.run(1000)
    limited.now += 1
    limited.run()
    limited.tenants = Tenants(TenantOptions(requests_per_minute=3, tokens_per_minute=3))
    limited.run()
    limited.run()
    assert limited.refusal().quota in ("requests_per_minute", "tokens_per_minute")


def test_idle_tenants_are_forgotten_and_running_ones_are_not() -> None:
    limited = Limited(max_concurrent_requests=1)
    with limited.limiter.admit("gold"):
        for number in range(5 * MAX_IDLE_TENANTS):
            limited.run(tenant=str(number))
        assert len(limited.limiter._uses) <= 2 * MAX_IDLE_TENANTS
        limited.refusal()


async def test_limits_hold_over_grpc_and_other_tenants_are_served(serve: ServerFactory) -> None:
    tenants = Tenants(
        TenantOptions(), {"gold": TenantOptions(max_concurrent_requests=1, tokens_per_minute=20)}
    )
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    async with (
        serve(security=Security(tenants=constant(tenants))) as server,
        AsyncClient(server.target) as client,
    ):
        server.brake.slow_down()
        events = client.generate_stream(PROMPT, endless, tenant="gold")
        await first_delta(events)
        with pytest.raises(QuotaExceeded) as caught:
            await client.generate(PROMPT, SamplingParams(max_tokens=1), tenant="gold")
        assert (caught.value.tenant, caught.value.quota) == ("gold", "concurrent_requests")
        await client.generate(PROMPT, SamplingParams(max_tokens=1), tenant="tin")
        server.brake.speed_up()
        async for _ in events:
            pass
        with pytest.raises(QuotaExceeded) as caught:
            await client.generate(PROMPT, SamplingParams(max_tokens=1), tenant="gold")
        assert caught.value.quota == "tokens_per_minute"
        assert caught.value.retry_after_s is not None
        # 200 tokens and the prompt's at 20 per minute, less what the run itself refilled.
        assert 60 < caught.value.retry_after_s < 660
        await asyncio.gather(
            *(client.generate(PROMPT, SamplingParams(max_tokens=1), tenant="tin") for _ in range(8))
        )
