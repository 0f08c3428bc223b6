"""Callers of chaos: an answer is whole although its connections break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from local_server import local_server
from tcp_proxy import tcp_proxy

from quire import AsyncClient
from tests.chaos.doors import Door
from tests.chaos.jobs import Job

# Bytes of the server after which a connection breaks: in its head, in the first events, and later.
CUTS = 150, 500, 900
# Only new connections break.
NO_REUSE = httpx.Limits(max_keepalive_connections=0)


@pytest.mark.parametrize("door", ["http-stream", "http"])
def test_answer_over_http_is_whole_although_its_connections_break(
    make_model: Callable[..., Path], door: str
) -> None:
    job = Job("n", "It was", door)

    async def run() -> None:
        async with (
            local_server(make_model("llama"), http=True) as server,
            AsyncClient(server.target) as grpc,
            tcp_proxy(server.url.removeprefix("http://")) as proxy,
            httpx.AsyncClient(base_url=f"http://{proxy.address}", timeout=60, limits=NO_REUSE) as http,
        ):
            callers = Door(grpc, [http])
            expected = await callers.answer(job)
            for number, num_bytes in enumerate(CUTS):
                proxy.cut_after = num_bytes
                assert await callers.answer(job, f"r{number}") == expected
            assert proxy.num_cuts == len(CUTS)

    asyncio.run(run())
