"""Client and AsyncClient have the same methods, and fill in what the server does not send."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from quire import AsyncClient, Client, SamplingParams
from quire.cluster.client.methods import RequestOptions
from quire.proto.errors import InvalidRequest
from quire.proto.inference_pb2 import GenerateResponse

ServerFactory = Callable[..., Any]

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)


@pytest.mark.parametrize("name", ["generate", "generate_stream", "chat", "chat_stream"])
def test_sampling_params_is_the_second_positional_parameter(name: str) -> None:
    names = list(inspect.signature(getattr(Client, name)).parameters)
    assert names[2] == "sampling_params"


async def test_wrong_argument_is_raised_where_the_response_is_awaited() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        response = client.generate("a", priority=1 << 40)
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await response


async def test_output_has_the_prompt_that_the_client_sent(serve: ServerFactory) -> None:
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


@pytest.mark.parametrize(
    ("options", "expected_s"), [({}, 7.0), ({"timeout_s": None}, 7.0), ({"timeout_s": 2.0}, 2.0)]
)
def test_call_has_the_client_s_deadline_unless_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch, options: RequestOptions, expected_s: float
) -> None:
    sent: dict[str, Any] = {}

    class Channel:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: (
                lambda request, **options: sent.update(options) or GenerateResponse()
            )

    monkeypatch.setattr(grpc, "insecure_channel", lambda target, options: Channel())
    Client("127.0.0.1:1", token="secret", timeout_s=7.0).generate("a", **options)
    assert sent["timeout"] == pytest.approx(expected_s, abs=1.0)
    assert sent["metadata"] == (("authorization", "Bearer secret"),)
