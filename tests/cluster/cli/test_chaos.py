"""`quire chaos` against a gateway that permits faults, and one that does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from recording_injector import RecordingInjector
from serving import ServerFactory
from typer.testing import CliRunner

from quire.cluster import cli
from quire.cluster.gateway.grpc.server import Gateway
from quire.proto.errors import ConfigError, InvalidRequest
from quire.proto.faults import FaultKind


async def quire_chaos(target: str, *arguments: str) -> str:
    """Run the command and return its output. Raises the error with which it ends."""
    command = ["chaos", *arguments, "--target", target]
    result = await asyncio.to_thread(CliRunner().invoke, cli.app, command)
    if result.exception is not None:
        raise result.exception
    return result.output


async def test_each_action_reaches_the_process_that_it_names(serve: ServerFactory) -> None:
    async with serve() as server:
        injector = RecordingInjector()
        gateway = Gateway(replace(server.services, faults=injector))
        target = await gateway.start()
        try:
            printed = [
                await quire_chaos(target, "kill-rank", "1"),
                await quire_chaos(target, "slow-rank", "--delay", "0.5", "--duration", "2"),
                await quire_chaos(target, "poison-rank", "--token-id", "7", "--duration", "3"),
                await quire_chaos(target, "stop-scheduler", "--replica", "rep"),
            ]
            with pytest.raises(InvalidRequest, match="there are replica-0"):
                await quire_chaos(target, "kill-scheduler", "--replica", "other")
        finally:
            await gateway.stop(0)
        assert [(rank, fault.kind) for _, rank, fault in injector.injected] == [
            (1, FaultKind.KILL), (0, FaultKind.SLOW), (0, FaultKind.POISON), (None, FaultKind.STOP),
        ]  # fmt: skip
        slow, poison = (fault for _, _, fault in injector.injected[1:3])
        assert (slow.delay_s, slow.duration_s) == (0.5, 2.0)
        assert (poison.token_id, poison.duration_s) == (7, 3.0)
        assert printed[0] == "replica-0: kill of rank 1, process 4711\n"
        assert printed[3] == "replica-0: stop of scheduler, process 4711\n"


async def test_server_that_was_not_started_for_it_refuses(serve: ServerFactory) -> None:
    async with serve() as server:
        with pytest.raises(ConfigError, match="start it with --enable-chaos for a game day"):
            await quire_chaos(server.target, "kill-rank", "0")
