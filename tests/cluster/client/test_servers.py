"""Selection of one of several gateways."""

from __future__ import annotations

import asyncio

import pytest
from serving import PROMPT, ServerFactory

from quire import AsyncClient, Client, SamplingParams
from quire.cluster.client.call import Call, Servers, split_target
from quire.proto.errors import ServerUnreachable

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("a:1", ["a:1"]),
        ("a:1, b:2,", ["a:1", "b:2"]),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ["ipv4:10.0.0.1:1,10.0.0.2:1"]),
        ("[::1]:1,a:2", ["[::1]:1", "a:2"]),
        ("", [""]),
    ],
)
def test_target_is_split_at_commas(target: str, expected: list[str]) -> None:
    assert split_target(target) == expected


def test_server_is_left_once_by_calls_that_fail_together() -> None:
    servers = Servers(["a", "b", "c"])
    for _ in range(3):
        servers.leave(0)
    assert servers.selected == 1
    servers.leave(1)
    servers.leave(2)
    assert servers.selected == 0


def test_call_is_sent_to_the_selected_server() -> None:
    servers = Servers(["a", "b"])
    methods = [lambda request, server=server, **options: (server, request, options) for server in "ab"]
    call = Call(servers, methods, "request", {"timeout": 1}, str)
    assert call.start() == ("a", "request", {"timeout": 1})
    servers.leave(0)
    assert call.start() == ("b", "request", {"timeout": 1})


async def test_calls_pass_over_a_server_that_is_not_there(serve: ServerFactory) -> None:
    def check(target: str) -> None:
        with Client(f"{NOWHERE},{target}") as client:
            assert [model.name for model in client.models()] == ["tiny"]
        with Client(f"{NOWHERE},{target}") as client:
            assert client.is_ready()

    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    async with serve() as server:
        async with AsyncClient(f"{NOWHERE},{server.target}") as client:
            assert len((await client.generate(PROMPT, sampling)).outputs[0].token_ids) == 2
        async with AsyncClient(f"{NOWHERE},{server.target}") as client:
            assert [model.name for model in await client.models()] == ["tiny"]
        await asyncio.to_thread(check, server.target)
    async with AsyncClient(f"{NOWHERE},127.0.0.1:2") as client:
        with pytest.raises(ServerUnreachable):
            await client.models()
