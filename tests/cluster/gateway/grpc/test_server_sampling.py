"""Sampling parameters, log-probabilities and logits processors over loopback gRPC."""

from __future__ import annotations

from typing import Any

import pytest
from narrowing import not_none
from serving import ServerFactory

from quire import AsyncClient, SamplingParams
from quire.cluster.client.wire.request_messages import sampling_from_message, sampling_to_message
from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.os_utils.watched_file import constant
from quire.cluster.text.requests.outputs import (
    CompletionDelta,
    PromptLogprobsDelta,
    RequestStarted,
    collect_output,
)
from quire.proto.errors import DuplicateRequest, InvalidRequest, RequestAborted

PROMPT = "The quick brown fox jumps over the lazy dog"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0),
        SamplingParams(
            repetition_penalty=1.5, frequency_penalty=-0.5, presence_penalty=2.0, logit_bias={0: -100, 7: 0.5},
            bad_words=("no", (1, 2)), allowed_token_ids=(9, 3), prompt_logprobs=0, logprobs=3, n=2, best_of=3,
            skip_special_tokens=False, include_stop_str_in_output=True, truncate_prompt_tokens=7, stop=("x",),
            stop_token_ids=(4,), seed=-1, min_tokens=2, max_tokens=9, ignore_eos=True, min_p=0.5,
        ),
    ],
)  # fmt: skip
def test_sampling_params_round_trip_through_messages(params: SamplingParams) -> None:
    """Unset parameters stay unset: the server decides them."""
    assert sampling_from_message(sampling_to_message(params)) == params


async def test_prompt_logprobs_over_the_network(serve: ServerFactory) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, n=2)
    async with serve(max_num_batched_tokens=8) as server, AsyncClient(server.target) as client:
        prompt = server.tokenizer.encode(PROMPT)
        whole = await client.generate(PROMPT, params)
        assert whole.prompt_logprobs is not None
        assert whole.prompt_logprobs[0] is None
        assert len(whole.prompt_logprobs) == len(prompt)
        stream = client.generate_stream(PROMPT, params)
        server.brake.let(2)  # the second chunk is not gathered before the event of the first one is read
        events = [await anext(stream), await anext(stream)]
        server.brake.release()
        events += [event async for event in stream]
        parts = [event for event in events if isinstance(event, PromptLogprobsDelta)]
        assert len(parts) > 1
        kinds = [type(event) for event in events]
        assert kinds[0] is RequestStarted
        assert kinds.index(CompletionDelta) > kinds.index(PromptLogprobsDelta)
        streamed = collect_output(events, prompt=PROMPT, prompt_token_ids=None, with_prompt_logprobs=True)
        assert streamed.prompt_logprobs == whole.prompt_logprobs
        assert [token_id for part in parts for token_id in part.token_ids] == prompt[1:]
        # They equal the logprobs of an output that is forced to be the prompt.
        for place in (1, 5):
            forced = SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=2, allowed_token_ids=prompt[place : place + 1]
            )
            (entry,) = not_none((await client.generate(prompt[:place], forced)).outputs[0].logprobs)
            expected = whole.prompt_logprobs[place]
            assert expected is not None
            token_id = prompt[place]
            assert next(iter(expected)) == token_id
            assert entry[token_id].logprob == pytest.approx(expected[token_id].logprob, abs=1e-4)
            ranks = [{each: logprob.rank for each, logprob in side.items()} for side in (entry, expected)]
            assert ranks[0] == ranks[1]
        (single,) = not_none((await client.generate([5], params)).prompt_logprobs)
        assert single is None
        assert (await client.generate(PROMPT, GREEDY)).prompt_logprobs is None


async def test_logits_processors_over_the_network(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        free = (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
        allowed = SamplingParams(
            temperature=0.0, max_tokens=6, allowed_token_ids=(70, 80), logit_bias={80: 100}
        )
        assert (await client.generate(PROMPT, allowed)).outputs[0].token_ids == [80] * 6
        forbidden = SamplingParams(
            temperature=0.0, max_tokens=6, bad_words=(tuple(free[:2]),), ignore_eos=True
        )
        assert (await client.generate(PROMPT, forbidden)).outputs[0].token_ids[:2] != free[:2]
        for options, field in (
            ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias[0]"),
            ({"bad_words": ["x" * 129]}, "sampling.bad_words"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(PROMPT, SamplingParams(**options))
            assert caught.value.field == field


async def test_add_special_tokens_reaches_the_tokenizer(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        asked: list[bool] = []
        encode = server.tokenizer.encode

        def recorded(text: str, **options: Any) -> list[int]:
            asked.append(options["add_special_tokens"])
            return encode(text, **options)

        server.tokenizer.encode = recorded
        await client.generate(PROMPT, GREEDY)
        await client.generate(PROMPT, GREEDY, add_special_tokens=False)
        assert asked == [True, False]


async def test_only_the_own_tenant_can_abort_a_request(serve: ServerFactory) -> None:
    """Request ids are separate per tenant."""
    tokens = TokenSet([Token.of("golden", "gold"), Token.of("tinny", "tin"), Token.of("plain")])
    security = Security(tokens=constant(tokens))
    async with (
        serve(security=security) as server,
        AsyncClient(server.target, token="golden") as gold,
        AsyncClient(server.target, token="tinny") as tin,
        AsyncClient(server.target, token="plain") as plain,
    ):
        server.brake.slow_down()
        events = gold.generate_stream(PROMPT, ENDLESS, request_id="mine")
        await anext(events)
        assert not await tin.abort("mine")
        assert not await plain.abort("mine")
        with pytest.raises(InvalidRequest) as caught:
            await plain.abort("mine", tenant="gold")
        assert caught.value.field == "tenant"
        with pytest.raises(DuplicateRequest):
            await gold.generate(PROMPT, GREEDY, request_id="mine")
        await tin.generate(PROMPT, GREEDY, request_id="mine")
        assert await gold.abort("mine")
        with pytest.raises(RequestAborted):
            async for _ in events:
                pass
        claimed = plain.generate_stream(PROMPT, ENDLESS, request_id="other", tenant="iron")
        await anext(claimed)
        assert not await plain.abort("other")
        assert await plain.abort("other", tenant="iron")
