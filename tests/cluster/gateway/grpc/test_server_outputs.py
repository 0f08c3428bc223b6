"""Several outputs per request, tenants, priorities and deadlines, over loopback gRPC with the real scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from serving import DEADLINE_S, ENDLESS, PROMPT, ServerFactory, first_delta, num_used_blocks, until_free

from quire.cluster.client.client import AsyncClient
from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.config.tenants import TenantOptions, Tenants
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.generation.active_request import RequestLog
from quire.cluster.os_utils.watched_file import constant
from quire.cluster.text.requests.output_processor import OutputProcessor
from quire.cluster.text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    RequestStarted,
    StreamEvent,
    collect_output,
)
from quire.cluster.text.requests.request import RequestChecker
from quire.proto.errors import DeadlineExpired, InvalidRequest, Overloaded, RequestAborted
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Finish, Submit
from quire.scheduler.core.queue.pace import Pace

SAMPLED = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)


def check_numbers(events: list[StreamEvent], n: int) -> None:
    """Check for one RequestStarted, consecutive delta numbers, and one CompletionFinished last per completion."""
    assert isinstance(events[0], RequestStarted)
    assert [e.sequence_number for e in events if isinstance(e, CompletionDelta)] == list(
        range(1, 1 + sum(isinstance(e, CompletionDelta) for e in events))
    )
    ended: set[int] = set()
    for event in events[1:]:
        assert isinstance(event, CompletionDelta | CompletionFinished)
        assert event.index not in ended
        if isinstance(event, CompletionFinished):
            ended.add(event.index)
    assert ended == set(range(n))


@pytest.mark.parametrize(
    "params",
    [
        replace(SAMPLED, n=3),
        replace(SAMPLED, n=2, best_of=4),
        SamplingParams(max_tokens=12, beam_width=4, n=3),
    ],
)
async def test_stream_and_unary_return_the_same_outputs(serve: ServerFactory, params: SamplingParams) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        whole = await client.generate(PROMPT, params)
        events = [event async for event in client.generate_stream(PROMPT, params)]
        await until_free(client)
    check_numbers(events, params.n)
    streamed = collect_output(
        events, prompt=PROMPT, prompt_token_ids=None, with_prompt_logprobs=False
    ).outputs
    assert [output.index for output in whole.outputs] == list(range(params.n))
    for one, other in zip(whole.outputs, streamed, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.usage.completion_tokens == len(one.token_ids) > 0
        # The second request finds the prompt's KV, and sums in another order.
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        assert one.score == pytest.approx(other.score, abs=1e-4)
    for values, known in (
        ([output.cumulative_logprob for output in streamed], params.is_ranked),
        ([output.score for output in streamed], params.beam_width is not None),
    ):
        if known:
            assert values == sorted(values, key=lambda value: -(value or 0.0))
        else:
            assert values == [None] * params.n


async def test_stop_string_ends_only_its_own_output(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        whole = (await client.generate(PROMPT, replace(SAMPLED, n=3))).outputs
        stop = whole[1].text[5:10]
        assert stop not in whole[0].text + whole[2].text
        cut = (await client.generate(PROMPT, replace(SAMPLED, n=3, stop=(stop,)))).outputs
        assert cut[1].text == whole[1].text[: whole[1].text.find(stop)]
        assert cut[1].stop_reason == stop
        for index in (0, 2):
            assert cut[index].token_ids == whole[index].token_ids
            assert cut[index].finish_reason == "length"


@pytest.mark.parametrize("params", [replace(ENDLESS, n=4), replace(ENDLESS, beam_width=4, n=2)])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_canceled_call_ends_all_its_outputs(
    serve: ServerFactory, params: SamplingParams, how: str
) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        events = client.generate_stream(PROMPT, params, request_id="several")
        assert isinstance(await anext(events), RequestStarted)
        async with asyncio.timeout(DEADLINE_S):
            while await num_used_blocks(client) < 4:
                await asyncio.sleep(0.01)
        assert server.replica.num_running == params.n
        if how == "close":
            await events.aclose()
        else:
            assert await client.abort("several")
            with pytest.raises(RequestAborted):
                async for _ in events:
                    pass
        await until_free(client)
        assert server.replica.num_running == 0
        queue = (await client.status())[0].queue
        assert (queue.num_running, queue.num_waiting) == (0, 0)


async def test_requests_run_by_priority(serve: ServerFactory) -> None:
    async with serve(policy="priority", max_num_seqs=1) as server, AsyncClient(server.target) as client:
        order: list[int] = []

        async def generate(priority: int) -> None:
            await client.generate(PROMPT, replace(SAMPLED, max_tokens=4), priority=priority)
            order.append(priority)

        server.brake.slow_down()
        running = client.generate_stream(PROMPT, ENDLESS, priority=10)
        await first_delta(running)
        server.brake.hold()
        calls = [asyncio.create_task(generate(priority)) for priority in (1, 3, 2)]
        async with asyncio.timeout(DEADLINE_S):
            while server.replica.num_running < 4:
                await asyncio.sleep(0.01)
        await running.aclose()
        server.brake.release()
        await asyncio.gather(*calls)
        assert order == [3, 2, 1]


async def test_queue_limit_counts_requests_not_outputs(serve: ServerFactory) -> None:
    async with serve(max_num_seqs=1, max_queue_len=2) as server, AsyncClient(server.target) as client:
        server.brake.slow_down()
        first = client.generate_stream(PROMPT, ENDLESS)
        await first_delta(first)
        server.brake.catch()
        calls = [asyncio.ensure_future(client.generate(PROMPT, replace(SAMPLED, n=3))) for _ in range(3)]
        async with asyncio.timeout(DEADLINE_S):
            while server.replica.num_running < 1 + 3 * 3:
                await asyncio.sleep(0.01)
        server.brake.release()
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)  # the one that is refused
        await first.aclose()
        server.brake.speed_up()
        results = await asyncio.gather(*calls, return_exceptions=True)
        rejected = [result for result in results if isinstance(result, BaseException)]
        assert len(rejected) == 1
        assert isinstance(rejected[0], Overloaded)
        assert server.replica.num_running == 0


async def test_deadline_ends_a_request_and_frees_its_blocks(serve: ServerFactory) -> None:
    """The scheduler ends the request, before any gRPC deadline."""
    async with serve() as server, AsyncClient(server.target) as client:
        checker = RequestChecker(server.config, server.tokenizer)
        request = checker.check(PROMPT, replace(ENDLESS, n=2), timeout_s=0.3)
        server.brake.hold()
        server.brake.slow_down()
        running = server.replica.submit(request)
        started = RequestStarted(request.request_id, "tiny", len(request.prompt_token_ids))
        log = RequestLog(started, running, OutputProcessor(request, server.tokenizer))
        await asyncio.sleep(0.4)
        server.brake.release()
        with pytest.raises(DeadlineExpired, match=r"its deadline passed before|computing it takes"):
            async for _ in log.read():
                pass
        running.abort()
        await until_free(client)


async def test_admission_uses_the_deadline_of_the_call(
    serve: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        pace, observe = server.scheduler._state.pace, Pace.observe_step
        # So that no canary's step counts.
        monkeypatch.setattr(Pace, "observe_step", lambda *_, **__: None)
        observe(pace, 100.0)
        pace.least_step_s = 100.0
        with pytest.raises(DeadlineExpired, match="computing it takes"):
            await client.generate(PROMPT, SAMPLED, timeout_s=30.0)


async def test_tenants_share_prefixes_only_within_a_named_pool(serve: ServerFactory) -> None:
    """A tenant cannot learn from cached_tokens what another one sent, and its prompts are computed either way."""
    pooled = TenantOptions(prefix_pool="metals")
    tenants = constant(Tenants(by_name={"copper": pooled, "zinc": pooled}))
    prompt = list(range(40))
    async with serve(security=Security(tenants=tenants)) as server, AsyncClient(server.target) as client:

        async def cached_tokens(tenant: str, salt: str = "") -> tuple[int, int]:
            """Tokens that the tenant is told of, and those that were found."""
            before = server.scheduler.blocks.num_hit_tokens
            params = SamplingParams(max_tokens=1)
            output = await client.generate(prompt, params, tenant=tenant, cache_salt=salt)
            return output.usage.cached_tokens, server.scheduler.blocks.num_hit_tokens - before

        assert await cached_tokens("gold") == (0, 0)
        assert await cached_tokens("gold") == (39, 39)
        assert await cached_tokens("tin") == (0, 0)
        assert await cached_tokens("") == (0, 0)
        assert await cached_tokens("gold", "a") == (0, 0)
        assert await cached_tokens("tin", "a") == (0, 0)
        assert await cached_tokens("gold", "a") == (39, 39)
        assert await cached_tokens("copper") == (0, 0)
        assert await cached_tokens("zinc") == (0, 39)
        assert await cached_tokens("zinc") == (32, 39)


async def test_token_determines_the_tenant(serve: ServerFactory) -> None:
    tokens = TokenSet([Token.of("golden", "gold"), Token.of("tinny", "tin"), Token.of("plain")])
    security = Security(tokens=constant(tokens))
    async with serve(security=security, policy="fair") as server:
        tenants: list[str] = []
        add = server.scheduler.add

        def recording_add(gateway: bytes, submit: Submit, now: float) -> Finish | None:
            tenants.append(submit.tenant)
            return add(gateway, submit, now)

        server.scheduler.add = recording_add
        for token, claimed, is_rejected in (
            ("golden", "", False),
            ("golden", "gold", False),
            ("golden", "tin", True),
            ("plain", "iron", False),
            ("plain", "tin", True),
        ):
            async with AsyncClient(server.target, token=token) as client:
                if not is_rejected:
                    await client.generate(PROMPT, SAMPLED, tenant=claimed)
                    continue
                with pytest.raises(InvalidRequest) as caught:
                    await client.generate(PROMPT, SAMPLED, tenant=claimed)
                assert caught.value.field == "tenant"
        assert tenants == ["gold", "gold", "iron"]


async def test_client_rejects_values_that_no_message_can_hold(serve: ServerFactory) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for options, field in (({"priority": 1 << 40}, "request"), ({"tenant": 5}, "request")):
            with pytest.raises(InvalidRequest, match="cannot be sent") as caught:
                await client.generate(PROMPT, **options)  # type: ignore[arg-type]
            assert caught.value.field == field
        with pytest.raises(InvalidRequest, match="cannot be sent") as caught:
            await client.generate("\ud800")
        assert caught.value.field == "prompt"


async def test_status_reports_host_memory(serve: ServerFactory) -> None:
    options = {
        "num_kv_blocks": 9,
        "num_host_kv_blocks": 32,
        "block_size": 4,
        "max_num_batched_tokens": 16,
    }
    async with serve(**options) as server, AsyncClient(server.target) as client:
        server.scheduler._state.costs.swap_blocks_per_s = 1e9
        calls = [client.generate([number] * 8, replace(SAMPLED, n=2)) for number in range(3)]
        await asyncio.gather(*calls)
        await server.replica.status(DEADLINE_S)  # a late one would be left out of the next line
        (replica,) = await client.status()
        assert replica.kv.num_host_blocks == 32
        assert replica.kv.num_used_host_blocks == 0
        assert replica.kv.num_cached_host_blocks > 0
        assert replica.kv.num_swapped_blocks > 0
        assert replica.queue.num_preemptions > 0
