"""Tokens, TLS, reflection and listen address of the gateway, over loopback gRPC."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from serving import DEADLINE_S, PROMPT, ServerFactory

from quire.cluster.client.client import AsyncClient, Client
from quire.cluster.client.wire.tokens import Token, TokenSet
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.grpc.server import Gateway
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import (
    ConfigError,
    ReplicaUnavailable,
    Unauthenticated,
)
from quire.proto.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


async def test_every_call_but_health_needs_a_token(serve: ServerFactory) -> None:
    async with serve(
        security=Security(tokens=constant(TokenSet([Token.of("one"), Token.of("two")])))
    ) as server:
        async with AsyncClient(server.target, token="two") as client:
            assert (await client.generate(PROMPT, GREEDY)).outputs[0].token_ids
            assert [event async for event in client.generate_stream(PROMPT, GREEDY)]
        for token in (None, "three", ""):
            async with AsyncClient(server.target, token=token) as client:
                assert await client.is_ready()
                for call in (client.models(), client.status(), client.generate(PROMPT)):
                    with pytest.raises(Unauthenticated):
                        await call
                with pytest.raises(Unauthenticated):
                    await anext(client.generate_stream(PROMPT))


async def test_reflection_lists_the_services(serve: ServerFactory) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with (
        serve(ready=False) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {"quire.v1.Inference", "quire.v1.Admin", "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_port_in_use_raises(serve: ServerFactory) -> None:
    async with serve(ready=False) as server:
        second = Gateway(server.services, server.target)
        with pytest.raises(ConfigError, match=f"cannot listen on {server.target}"):
            await second.start()


def test_unreachable_server_raises_replica_unavailable() -> None:
    with socket.socket() as bound:  # and not listening, so that no other process gets the port
        bound.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{bound.getsockname()[1]}"
        with Client(target, timeout_s=DEADLINE_S) as client:
            assert not client.is_ready()
            with pytest.raises(ReplicaUnavailable, match=target):
                client.generate("hello")
