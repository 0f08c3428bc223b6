"""Client and AsyncClient have the same methods, and fill in what the server does not send."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from quire import AsyncClient, Client, SamplingParams
from quire.cluster.client.calls import Calls
from quire.cluster.client.servers import Servers

ServerFactory = Callable[..., Any]

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)


def public_methods(client: type) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(client, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}


def test_both_clients_have_the_same_methods_and_parameters() -> None:
    synchronous, asynchronous = public_methods(Client), public_methods(AsyncClient)
    assert synchronous.keys() == asynchronous.keys()
    for name, signature in synchronous.items():
        assert list(signature.parameters.values()) == list(asynchronous[name].parameters.values()), name


@pytest.mark.parametrize("name", ["generate", "generate_stream", "chat", "chat_stream"])
def test_sampling_params_is_the_second_positional_parameter(name: str) -> None:
    names = list(public_methods(Client)[name].parameters)
    assert names[2] == "sampling_params"


def test_output_has_the_prompt_that_the_client_sent(serve: ServerFactory) -> None:
    async def scenario() -> None:
        async with serve() as server, AsyncClient(server.target) as client:
            text, ids, cut = [
                await client.generate(prompt, params)
                for prompt, params in (
                    ("The quick", PARAMS),
                    ([5, 6, 7], PARAMS),
                    ([4, 5, 6, 7], SamplingParams(max_tokens=1, truncate_prompt_tokens=3)),
                )
            ]
        assert (text.prompt, text.prompt_token_ids) == ("The quick", None)
        assert (ids.prompt, ids.prompt_token_ids, cut.prompt_token_ids) == (None, [5, 6, 7], [5, 6, 7])
        assert [entry and next(iter(entry)) for entry in ids.prompt_logprobs or ()] == [None, 6, 7]
        (output,) = ids.outputs
        assert [next(iter(entry)) for entry in output.logprobs or ()] == output.token_ids
        assert all(each.decoded_token is None for entry in output.logprobs or () for each in entry.values())

    asyncio.run(scenario())


def test_call_has_the_client_s_deadline_unless_it_has_its_own() -> None:
    class Channel:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: None

    calls = Calls(Servers(["127.0.0.1:1"]), [Channel()], "secret", 7.0)
    assert calls.generate("a", None, {}).options["timeout"] == 7.0
    assert calls.generate("a", None, {"timeout_s": None}).options["timeout"] == 7.0
    assert calls.generate("a", None, {"timeout_s": 2.0}).options["timeout"] == 2.0
    assert calls.models().options["metadata"] == (("authorization", "Bearer secret"),)
