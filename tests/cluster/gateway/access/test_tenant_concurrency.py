"""TenantConcurrency: long work of one tenant leaves room for that of others, also after its callers have gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.cluster.gateway.access import tenant_limits
from quire.cluster.gateway.access.tenant_limits import TenantConcurrency
from quire.cluster.gateway.generation.generation import GenerationCall
from quire.cluster.text.sandbox import grammar_workers, tokenizer_workers
from quire.proto.errors import InvalidRequest, Overloaded
from quire.proto.sampling import SamplingParams

DEADLINE_S = 60.0


async def test_other_tenants_do_not_wait_for_long_work() -> None:
    limit, is_over, started = TenantConcurrency(), threading.Event(), threading.Semaphore(0)

    def long_work() -> bool:
        started.release()
        return is_over.wait(DEADLINE_S)

    calls = [asyncio.create_task(limit.run("iron", long_work)) for _ in range(9)]
    for _ in range(tenant_limits.MAX_CONCURRENT):
        await asyncio.to_thread(started.acquire)
    assert await limit.run("gold", lambda: 7) == 7
    assert not started.acquire(blocking=False)
    is_over.set()
    assert all(await asyncio.gather(*calls))
    assert limit._tenants == {}


async def test_work_of_a_caller_who_has_gone_counts_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_limits, "QUEUE_TIMEOUT_S", 0.01)
    limit, is_over, has_begun = TenantConcurrency(1), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def long_work() -> bool:
        loop.call_soon_threadsafe(has_begun.set)
        return is_over.wait(DEADLINE_S)

    call = asyncio.create_task(limit.run("iron", long_work))
    await has_begun.wait()
    call.cancel()
    await asyncio.wait([call])
    with pytest.raises(Overloaded, match="earlier requests of the tenant"):
        await limit.run("iron", lambda: None)
    is_over.set()
    while limit._tenants:
        await asyncio.sleep(0)
    assert await limit.run("iron", lambda: 7) == 7


async def test_work_that_raises_counts_no_more() -> None:
    limit = TenantConcurrency(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await limit.run("", lambda: 1 // 0)


def test_one_tenant_cannot_use_all_worker_processes() -> None:
    assert 2 * tenant_limits.MAX_CONCURRENT < tokenizer_workers.NUM_WORKERS
    assert tenant_limits.MAX_CONCURRENT < grammar_workers.NUM_WORKERS


def test_digest_of_a_prompt_with_a_huge_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: has a number of more than 64 bits"):
        GenerationCall([1, 10**30], SamplingParams()).digest()
